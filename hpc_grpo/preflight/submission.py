"""What can be told on the login node of a job that would fail: said before it queues for hours to say the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.freeze import working_dir
from hpc_grpo.launch.place.slurm.partition import refuse_what_cannot_start
from hpc_grpo.preflight import inputs as local_inputs
from hpc_grpo.preflight.asked_gpus import refuse_too_few_gpus
from hpc_grpo.run.paths import RunDir


def refuse_what_fails(config: Config) -> None:
    """Raise the first of `refusals`."""
    for error in refusals(config):
        raise error


def refusals(config: Config) -> Iterator[ConfigError]:
    """Why the job would fail as soon as it starts, or would never start, as far as a login node can tell."""
    run = RunDir(config.run_path)
    start = working_dir(run) if run.config.exists() else Path.cwd()
    for check in (
        partial(local_inputs.refuse_missing_python, config.launch),
        partial(local_inputs.refuse_missing_notify, config.launch, start),
        partial(local_inputs.refuse_missing_inputs, config, start),
        partial(local_inputs.refuse_unreadable_data, config, start),
        partial(refuse_too_few_gpus, config),
        partial(refuse_what_cannot_start, config.launch.slurm),
    ):
        try:
            check()
        except ConfigError as error:
            yield error
