"""Tell a user who does not look: the job runs a command of theirs when something has become of the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.launch.chain.decide import News
from hpc_grpo.launch.freeze import working_dir
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.commands import Answer, run_command
from hpc_grpo.system.say import say


def notify(command: Sequence[str], run: RunDir, news: News, deadline_s: float = 30.0) -> None:
    """Run `command` in the run's working directory, with HPC_GRPO_EVENT, HPC_GRPO_RUN and HPC_GRPO_WHY set.

    Kills it after `deadline_s`. Says what it prints, and where it fails, which changes nothing for the run.
    """
    told = {"HPC_GRPO_EVENT": news.event, "HPC_GRPO_RUN": str(run.path), "HPC_GRPO_WHY": news.why}
    try:
        program = str(Path(command[0]).expanduser())
        environ, folder = {**os.environ, **told}, working_dir(run)
        answer = run_command([program, *command[1:]], deadline_s, environ=environ, stdin="", cwd=folder)
    except (OSError, HpcGrpoError, RuntimeError, ValueError) as error:
        # RuntimeError: ~name of nobody. ValueError: text that the environment cannot hold.
        answer = Answer(error=str(error))
    for text in filter(None, (answer.text.strip(), answer.said)):
        say(text)
    if answer.error:
        say(f"launch.notify could not tell that the run is {news.event}: {answer.error}")
