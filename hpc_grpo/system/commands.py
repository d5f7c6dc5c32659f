"""Run a command of the machine (scontrol, nvidia-smi) for its output, or one of hpc-grpo's in the foreground."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hpc_grpo.system.processes import die_with_parent
from hpc_grpo.system.signals import Signals

_SIGNALS_S = 0.2
"""Seconds between two checks for received signals."""
_KILLED_S = 1.0
"""A process in state D, such as nvidia-smi at a broken GPU, survives SIGKILL. It is abandoned after this time."""

MARK = "hpc-grpo: what follows is the command's own output"


def marked(command: str) -> str:
    """Return a shell line for another machine that prints MARK before the command's output.

    Startup files such as ~/.bashrc may print too. Text before MARK is not the command's.
    """
    return f'echo; echo "{MARK}"; {command}'


@dataclass(frozen=True)
class Answer:
    """The output of a command. `error` is "" after success, else one line with the reason.

    `text` is its stdout after success, `said` all of its stderr. `is_absent`: the command does not exist here.
    `is_late`: it was killed at its deadline.
    """

    text: str = ""
    error: str = ""
    said: str = ""
    is_absent: bool = False
    is_late: bool = False


def run_command(
    argv: Sequence[str],
    deadline_s: float = 10.0,
    *,
    environ: Mapping[str, str] | None = None,
    stdin: str | None = None,
    cwd: Path | None = None,
) -> Answer:
    """Run `argv`. Never raises if it is missing, fails or hangs. `environ` replaces this process's environment.

    Returns at most a second after the deadline, even if the process cannot end. Does not wait for background processes
    of `argv`: no pipe holds the output, since such a process would keep a pipe open.
    """
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(open(os.memfd_create("output"), "w+", errors="replace")) for _ in range(3)]  # noqa: PTH123
        given, output, errors = files
        given.write(stdin or "")
        given.seek(0)
        try:
            process = subprocess.Popen(
                argv, env=environ, cwd=cwd, stdin=None if stdin is None else given, stdout=output, stderr=errors
            )
        except FileNotFoundError:
            return Answer(error=f"no {argv[0]} on PATH", is_absent=True)
        except OSError as error:
            return Answer(error=f"{argv[0]} could not be run: {error.strerror}")
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_S)
            return Answer(error=f"{argv[0]} gave no answer within {deadline_s:.0f} s", is_late=True)
        out, said = _whole(output), _whole(errors).strip()
    if process.returncode:
        lines = (said or out.strip()).splitlines()
        ended = f"{argv[0]} ended with {process.returncode}" + (f": {lines[-1]}" if lines else "")
        return Answer(error=ended, said=said)
    return Answer(out, said=said)


def _whole(file: TextIO) -> str:
    file.seek(0)
    return file.read()


def run_in_foreground(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, *, own_session: bool = False
) -> int:
    """Run `argv` on this process's terminal until it ends. Return its exit code, negative for a signal.

    This process forwards signals, SIGHUP as SIGTERM. Ctrl+C reaches the command from the terminal; with `own_session`
    only through this process, which may be a notebook's. No signal ends this process earlier. Call it from the main
    thread.
    """
    with Signals() as signals:
        # sys.stdout may be redirected, which the child would not inherit. But a notebook shows what the child inherits.
        stdout = None if own_session else sys.stdout
        process = subprocess.Popen(
            argv, env=environ, stdout=stdout, start_new_session=own_session, preexec_fn=die_with_parent()
        )
        while process.poll() is None:
            while signals.pending:
                number = signals.pending.pop(0)
                if own_session or number != signal.SIGINT:
                    process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SIGNALS_S)
        return process.returncode
