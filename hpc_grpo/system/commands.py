"""Run commands: one of the machine's own (scontrol, nvidia-smi) for what it prints, one of ours in the foreground."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_grpo.system.processes import die_with_parent
from hpc_grpo.system.signals import Signals

_SIGNALS_S = 0.2
"""Between two looks at the signals that have come."""


@dataclass(frozen=True)
class Answer:
    """The output of a command; `error` is "" if it succeeded, else one line that says why not.

    `text` is its stdout if it succeeded, `said` the whole of its stderr. `is_absent`: there is no such command here;
    `is_late`: it was killed at its deadline.
    """

    text: str = ""
    error: str = ""
    said: str = ""
    is_absent: bool = False
    is_late: bool = False


def run_command(
    argv: Sequence[str], deadline_s: float = 10.0, *, environ: Mapping[str, str] | None = None, stdin: str | None = None
) -> Answer:
    """Run `argv`; never raises where it is missing, fails or hangs. `environ` replaces this process's environment."""
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            env=environ,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
            errors="replace",
        )
    except FileNotFoundError:
        return Answer(error=f"no {argv[0]} on PATH", is_absent=True)
    except subprocess.TimeoutExpired:
        return Answer(error=f"{argv[0]} gave no answer within {deadline_s:.0f} s", is_late=True)
    except OSError as error:
        return Answer(error=f"{argv[0]} could not be run: {error.strerror}")
    said = done.stderr.strip()
    if done.returncode:
        lines = (said or done.stdout.strip()).splitlines()
        ended = f"{argv[0]} ended with {done.returncode}" + (f": {lines[-1]}" if lines else "")
        return Answer(error=ended, said=said)
    return Answer(done.stdout, said=said)


def run_in_foreground(argv: Sequence[str]) -> int:
    """Run `argv` to its end over this process's terminal and return its exit code, negative for a signal.

    It ends in its own time: SIGTERM is passed on, Ctrl+C reaches it from the terminal, and neither ends this process
    before. Call it from the main thread.
    """
    with Signals() as signals:
        process = subprocess.Popen(argv, preexec_fn=die_with_parent())
        while process.poll() is None:
            if signal.SIGTERM in signals.pending:
                process.terminate()
                signals.pending.clear()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SIGNALS_S)
        return process.returncode
