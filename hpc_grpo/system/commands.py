"""Run one of the machine's own commands (scontrol, nvidia-smi) for what it prints, with a deadline."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
