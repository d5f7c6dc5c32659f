"""Ending runs and taking them up again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from hpc_grpo.cli.options import DRIVER, OVERRIDES

if TYPE_CHECKING:
    from hpc_grpo.config import LaunchConfig
    from hpc_grpo.run.paths import RunDir

_RUN = click.argument("run", metavar="RUN")


@click.command()
@_RUN
def stop(run: str) -> None:
    """End a run after the step in progress and a checkpoint; its follow-on job is cancelled then."""
    from hpc_grpo.run.lock import read_lock_owner

    run_dir = _find(run)
    if _is_over(run_dir):
        return
    run_dir.stop_marker.touch()
    if read_lock_owner(run_dir) is None:
        click.echo("Nothing trains it now; a job that waits will end as soon as it starts.")
    else:
        click.echo(f"{run_dir.path.name} stops after its step and a checkpoint.")
    click.echo(f"Take it up again with: hpc-grpo resume {run}")


@click.command()
@_RUN
def cancel(run: str) -> None:
    """End a run and all its jobs now; steps after the last checkpoint are lost. A second time does no harm."""
    from hpc_grpo.launch.chain.cancel import cancel_run

    run_dir = _find(run)
    if _is_over(run_dir):
        return
    for line in cancel_run(run_dir):
        click.echo(line)


@click.command()
@_RUN
@OVERRIDES
@DRIVER
def resume(run: str, overrides: tuple[str, ...], driver: str) -> None:
    """Submit a run again with what its last job had: after stop, cancel, or a chain that gave up.

    KEY=VALUE changes its config first, such as launch.slurm.time_min=600: keys that do not change what is learned.
    """
    from hpc_grpo.cli.run import submit_run
    from hpc_grpo.launch.freeze import freeze, reconfigured
    from hpc_grpo.launch.place import job_queue
    from hpc_grpo.launch.place.base import JobRequest
    from hpc_grpo.launch.place.slurm.sbatch import attempt_command
    from hpc_grpo.preflight.inputs import refuse_what_fails
    from hpc_grpo.run.lock import refuse_if_held

    run_dir = _find(run)
    if not overrides and _is_over(run_dir):
        return
    refuse_if_held(run_dir)
    config = reconfigured(run_dir, overrides)
    launch = _asked_next(run_dir, overrides)
    job = JobRequest(run_dir, launch, attempt_command(run_dir, driver))
    job_queue().render(job)  # raises ConfigError for options that sbatch cannot take
    refuse_what_fails(config.model_copy(update={"launch": launch}))
    if overrides:
        freeze(config, sys.argv, overrides)
    if not _is_over(run_dir):  # more steps reopen one that was
        submit_run(run_dir, launch, driver)


def _asked_next(run: RunDir, overrides: Sequence[str]) -> LaunchConfig:
    """What the next job asks for: what the last one had, and before it the overrides."""
    from hpc_grpo.config import load_resolved, with_overrides
    from hpc_grpo.run.chain import read_chain

    config = load_resolved(run.config)
    launch = read_chain(run).launch(config.launch)
    if any(word.startswith("launch.slurm.extra.mem") for word in overrides):  # of these sbatch takes one
        extra = {name: value for name, value in launch.slurm.extra.items() if not name.startswith("mem")}
        launch = launch.model_copy(update={"slurm": launch.slurm.model_copy(update={"extra": extra})})
    return with_overrides(config.model_copy(update={"launch": launch}), overrides).launch


def _find(run: str) -> RunDir:
    from hpc_grpo.cli.options import find_run

    return find_run(run)


def _is_over(run: RunDir) -> bool:
    if run.is_complete():
        click.echo(f"The run in {run.path} is complete.")
    return run.is_complete()


COMMANDS = (stop, cancel, resume)
