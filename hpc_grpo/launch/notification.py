"""Telling a user who does not look: a command of theirs, run by the job when something has become of the run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hpc_grpo.launch.telling import say
from hpc_grpo.run_dir import RunDir

Event = Literal["complete", "ended", "retrying"]
"""`ended`: no further job of the chain, and more to do. `retrying`: an attempt failed, the next job carries on."""

_DEADLINE_S = 30.0


def notify(command: Sequence[str], run: RunDir, event: Event, why: str) -> None:
    """Run `command`, if there is one, with HPC_GRPO_EVENT, HPC_GRPO_RUN and HPC_GRPO_WHY in its environment.

    It has 30 s. A command that fails is told, and changes nothing for the run.
    """
    if not command:
        return
    told = {"HPC_GRPO_EVENT": event, "HPC_GRPO_RUN": str(run.path), "HPC_GRPO_WHY": why}
    try:
        argv = [str(Path(command[0]).expanduser()), *command[1:]]
        code = subprocess.run(
            argv, env={**os.environ, **told}, stdin=subprocess.DEVNULL, timeout=_DEADLINE_S
        ).returncode
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: ~name of nobody
        say(f"launch.notify could not tell that the run is {event}: {error}")
        return
    if code != 0:
        say(f"launch.notify ended with {code}; it was to tell that the run is {event}.")
