"""What the loops share: the database, machines, bell and logs, and the retry while the database is away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from hpc_grpo.fleet.db import Database, DatabaseAwayError
from hpc_grpo.fleet.doorbell import Bell
from hpc_grpo.fleet.machine import Decide, LocalMachine, Machine, SshMachine, VisitError, Vm
from hpc_grpo.fleet.messages import AttemptKey, AttemptSeen, Outcome, Request, file_name
from hpc_grpo.fleet.observe import missed
from hpc_grpo.fleet.settings import Fleet
from hpc_grpo.system.say import say
from hpc_grpo.system.signals import end_signals

_AGAIN_S = (0.5, 1.0, 2.0, 5.0)


class Controller:
    """One process of a fleet's control. Several may run at once: each decision is a compare-and-set in the database."""

    def __init__(self, fleet: Fleet, make_machine: Callable[[Vm], Machine] | None = None) -> None:
        self.settings = fleet.settings
        self.db = Database(fleet.database_url)
        self.logs = JobLogs(fleet.logs)
        self.bell = Bell(fleet.nats_url)
        self._make_machine = make_machine or (
            lambda vm: LocalMachine(vm) if vm.transport == "local" else SshMachine(vm, fleet.known_hosts)
        )
        self._machines: dict[int, tuple[Vm, Machine]] = {}

    async def visit(self, vm: Vm, request: Request, decide: Decide) -> Outcome:
        """Visit a VM in at most `visit_s`. Raises VisitError, after it wrote the reason into the VM's row."""
        known, machine = self._machines.get(vm.vm_id, (None, None))
        if machine is None or known != vm:  # the first visit, or the row has changed
            if machine is not None:
                await self._leave(vm, machine)
            machine = self._make_machine(vm)
            self._machines[vm.vm_id] = vm, machine
        try:
            async with asyncio.timeout(self.settings.visit_s):
                return await machine.visit(request, decide)
        except (VisitError, TimeoutError) as error:
            is_before_orders = isinstance(error, VisitError) and error.is_before_orders
            why = str(error) or f"no answer within {self.settings.visit_s:.0f} s"
            await self._leave(vm, machine)
            await asyncio.to_thread(missed, self.db, vm.vm_id, why)
            raise VisitError(why, is_before_orders) from error

    async def _leave(self, vm: Vm, machine: Machine) -> None:
        """Close the connection to a VM. Another visit may have made a new one meanwhile, which stays."""
        if self._machines.get(vm.vm_id, (vm, None))[1] is machine:
            del self._machines[vm.vm_id]
        await machine.close()

    async def run(self, loops: Sequence[Callable[[], Awaitable[None]]], *, listens: bool) -> None:
        """Run the loops until a signal. Without a controller, jobs continue for the length of their lease.

        `listens`: also receive jobs that other processes announce, for a loop that dispatches.
        """
        ended = asyncio.Event()
        for sig in (*end_signals(), signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, ended.set)
        tasks: list[asyncio.Task[object]] = [asyncio.create_task(_run_again(loop)) for loop in loops]
        tasks += [asyncio.create_task(self.bell.listen())] if listens else []
        tasks.append(asyncio.create_task(ended.wait()))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.close()
        for task in done:
            if error := task.exception():
                raise error

    async def close(self) -> None:
        for _, machine in self._machines.values():
            with contextlib.suppress(OSError):
                await machine.close()
        self._machines.clear()
        self.db.close()


async def _run_again(loop: Callable[[], Awaitable[None]]) -> None:
    """Run a loop, and run it again after the database was away."""
    tries = 0
    while True:
        began = asyncio.get_running_loop().time()
        try:
            await loop()
        except DatabaseAwayError as error:
            if asyncio.get_running_loop().time() - began > _AGAIN_S[-1] * 2:
                tries = 0
            if tries == 0:
                say(f"{error} Jobs continue; the controller waits for the database.")
            await asyncio.sleep(_AGAIN_S[min(tries, len(_AGAIN_S) - 1)])
            tries += 1


class JobLogs:
    """The jobs' logs in the controller's folder: logs/JOB/ATTEMPT.log, and logs/JOB.log for the newest attempt.

    Writes log pieces from visits, each at its offset: writing a piece twice changes nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, job_id: str, attempt: int | None = None) -> Path:
        """Return the path of an attempt's log; by default, of the newest attempt with a log."""
        name = file_name(job_id)
        return self._folder / f"{name}.log" if attempt is None else self._folder / name / f"{attempt}.log"

    def size(self, key: AttemptKey) -> int:
        path = self.path(*key)
        return path.stat().st_size if path.exists() else 0

    def add(self, seen: AttemptSeen, offset: int) -> bool:
        """Write a piece of a log that begins at `offset`. Return whether the controller now has all of the VM's log."""
        path = self.path(*seen.key)
        if seen.log:
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.seek(offset)
                file.write(seen.log)
            link = self.path(seen.key.job_id)
            # An older attempt's log may come after a newer one's.
            if offset == 0 and not (link.is_symlink() and int(link.readlink().stem) > seen.key.attempt):
                beside = link.with_name(f".{link.name}.{os.getpid()}")
                beside.unlink(missing_ok=True)
                beside.symlink_to(path.relative_to(self._folder))
                beside.replace(link)
        return self.size(seen.key) >= seen.log_size
