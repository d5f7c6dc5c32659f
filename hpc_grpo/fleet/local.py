"""This machine as a VM of its own fleet: the same program, without ssh."""

from __future__ import annotations

import asyncio
import os
import sys

from hpc_grpo.fleet.machine import LONGEST_LINE, Decide, VisitError, Vm, converse
from hpc_grpo.fleet.messages import Outcome, Request
from hpc_grpo.fleet.settings import DATABASE_VARIABLE, NATS_VARIABLE


class LocalMachine:
    """Visits by a child process. `python` of the row may name another interpreter than this one."""

    def __init__(self, vm: Vm) -> None:
        self._python = sys.executable if vm.python in ("", "python3") else vm.python

    async def visit(self, request: Request, decide: Decide) -> Outcome:
        """See Machine."""
        pipe = asyncio.subprocess.PIPE
        argv = (self._python, "-m", "hpc_grpo.fleet.visit")
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=pipe, stdout=pipe, stderr=pipe, limit=LONGEST_LINE, env=_environment()
            )
        except OSError as error:
            raise VisitError(f"{self._python} could not be run: {error.strerror}", is_before_orders=True) from error
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            return await converse(process.stdout, process.stdin, request, decide)
        except VisitError as error:
            if said := _last_line(await process.stderr.read()):
                raise VisitError(f"{error}: {said}", error.is_before_orders) from error
            raise
        finally:
            process.stdin.close()
            if process.returncode is None:
                await _end(process)

    async def close(self) -> None:
        """Nothing is kept open."""


def _environment() -> dict[str, str]:
    """Return this process's environment without the fleet's URLs: their passwords are none of the jobs'."""
    return {name: value for name, value in os.environ.items() if name not in (DATABASE_VARIABLE, NATS_VARIABLE)}


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let the program end by itself, which it does at the end of its stdin; kill one that does not."""
    try:
        await asyncio.wait_for(process.wait(), 2.0)
    except TimeoutError:
        process.kill()
        await process.wait()


def _last_line(stderr: bytes) -> str:
    return next(iter(stderr.decode(errors="replace").strip().splitlines()[-1:]), "")
