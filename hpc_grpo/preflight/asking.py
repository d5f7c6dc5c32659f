"""Asking one of the machine's own commands (scontrol, sacctmgr, nvidia-smi), with a deadline."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What a command printed. `error` is "" if it succeeded; `is_absent`: there is no such command here."""

    text: str = ""
    error: str = ""
    is_absent: bool = False


def ask(argv: Sequence[str], deadline_s: float = 10.0) -> Answer:
    """Run `argv` and give its answer; never raises for a command that is missing, fails or hangs."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=deadline_s, check=False, errors="replace")
    except FileNotFoundError:
        return Answer(error=f"no {argv[0]} on PATH", is_absent=True)
    except subprocess.TimeoutExpired:
        return Answer(error=f"{argv[0]} gave no answer within {deadline_s:.0f} s")
    except OSError as error:
        return Answer(error=f"{argv[0]} could not be run: {error.strerror}")
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return Answer(error=f"{argv[0]} ended with {done.returncode}" + (f": {said[-1]}" if said else ""))
    return Answer(done.stdout)
