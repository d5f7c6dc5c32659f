"""Tell a user who does not look: the job runs a command of theirs when something has become of the run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.launch.chain.decide import News
from hpc_grpo.launch.freeze import working_dir
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.say import say


def notify(command: Sequence[str], run: RunDir, news: News, deadline_s: float = 30.0) -> None:
    """Run `command` in the run's working directory, with HPC_GRPO_EVENT, HPC_GRPO_RUN and HPC_GRPO_WHY set.

    Kills it after `deadline_s`. Says where the command fails, which changes nothing for the run.
    """
    told = {"HPC_GRPO_EVENT": news.event, "HPC_GRPO_RUN": str(run.path), "HPC_GRPO_WHY": news.why}
    try:
        program = str(Path(command[0]).expanduser())
        code = subprocess.run(
            [program, *command[1:]],
            cwd=working_dir(run),
            env={**os.environ, **told},
            stdin=subprocess.DEVNULL,
            timeout=deadline_s,
        ).returncode
    except (OSError, HpcGrpoError, subprocess.TimeoutExpired, RuntimeError, ValueError) as error:
        # RuntimeError: ~name of nobody. ValueError: text that the environment cannot hold.
        say(f"launch.notify could not tell that the run is {news.event}: {error}")
        return
    if code != 0:
        say(f"launch.notify ended with {code}; it was to tell that the run is {news.event}.")
