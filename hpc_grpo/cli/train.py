"""The commands `train` and `fork`, and the hidden ones that job scripts run: `attempt` and `job-setup`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from hpc_grpo.cli.options import CONFIG_OR_RUN, DRIVER, OVERRIDES, RUN, STARTS_RUN, echo, open_run
from hpc_grpo.cli.request import Request, load_request_or_run, naming_our_keys
from hpc_grpo.errors import EXIT_CRASH
from hpc_grpo.launch.chain.link import LinkJob
from hpc_grpo.launch.chain.submit import remove_stop
from hpc_grpo.launch.fork import fork as fork_run
from hpc_grpo.launch.freeze import freeze, is_over
from hpc_grpo.launch.place.job_queue import setup_lines
from hpc_grpo.launch.supervisor.attempt import run_attempt
from hpc_grpo.preflight.inputs import refusals, refuse_unknown_models
from hpc_grpo.run.checkpoint import newest_step
from hpc_grpo.run.contract import DEFAULT_DRIVER
from hpc_grpo.run.evals import ANSWER
from hpc_grpo.run.lock import refuse_if_held
from hpc_grpo.run.paths import CELLS, RunDir
from hpc_grpo.run.source import become_copy
from hpc_grpo.system.commands import run_in_foreground


@click.command()
@CONFIG_OR_RUN
@OVERRIDES
@click.option("--link", is_flag=True, hidden=True, help="This Slurm job was submitted only for this run.")
@STARTS_RUN
def train(config_name: str, overrides: tuple[str, ...], link: bool, accepts_changes: bool, driver: str) -> None:
    """Train here: on this machine, or on all nodes of the Slurm allocation this shell is in.

    CONFIG is a .yaml file, a .sh file that sets TRAINING_ARGS, or the name of a shipped config. The same
    command, or RUN instead of CONFIG, resumes an interrupted run.
    """
    start_training(load_request_or_run(config_name, overrides), accepts_changes, driver, is_link=link)


@click.command()
@RUN
@click.option("--step", type=click.IntRange(0), metavar="N", help="Step of a checkpoint of RUN. Default: the newest.")
@OVERRIDES
def fork(run_name: str, step: int | None, overrides: tuple[str, ...]) -> None:
    """Begin a new run from a checkpoint of RUN, with other values of some keys.

    Model, optimizer, schedule and position in the data continue from step N. RUN does not change. The name of the new
    run is RUN-from-N, or run.name=NAME.
    """
    with naming_our_keys():
        new = fork_run(open_run(run_name), step, sys.argv, overrides)
    echo(f"Forked {run_name} at step {newest_step(new)}: {new.path}")
    echo(f"Train it with: hpc-grpo submit {new.path}    (or here: hpc-grpo train {new.path})")


@click.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--link/--no-link", default=True)
@click.option("--successor-of", default="")
@click.option("--by-hand", is_flag=True)
@DRIVER
def attempt(run_dir: Path, link: bool, successor_of: str, by_hand: bool, driver: str) -> None:
    """Run one attempt of a frozen run: what a submitted job executes."""
    origin = LinkJob(successor_of, by_hand) if link else None
    run = RunDir(run_dir.readlink() if run_dir.parent.name == CELLS else run_dir.absolute())
    code = run_attempt(run, driver, origin)
    if code == 0 and (run.path / ANSWER).is_file():  # an eval that was started on another node
        echo((run.path / ANSWER).read_text(), nl=False)
    sys.exit(code)


@click.command("job-setup", hidden=True)
@CONFIG_OR_RUN
@OVERRIDES
@STARTS_RUN
def job_setup(config_name: str, overrides: tuple[str, ...], accepts_changes: bool, driver: str) -> None:
    """Print the shell lines that a job runs first. sbatch/grpo_rlzero.sbatch calls this with the words of `train`."""
    for line in setup_lines(load_request_or_run(config_name, overrides).config.launch):
        echo(line)


def start_training(
    request: Request, accepts_changes: bool, driver: str, is_link: bool = False, is_restart: bool = False
) -> NoReturn:
    """Freeze the run and become its attempt in this process. `is_link`: this job was submitted for the run only.

    `is_restart`: the earlier attempt may have just been killed. Its heartbeat is watched before a start is refused.
    """
    request.tell()
    os.environ.update(request.exported)
    run = RunDir(request.config.run_path)
    if not is_link:  # a link may wait for the previous link
        refuse_if_held(run, time.sleep if is_restart else None)
        if driver == DEFAULT_DRIVER:  # another driver, such as a test's, may not read the config's inputs
            refuse_wrong_inputs(request, accepts_changes)
    what = "Resuming run" if run.has_config() else "New run"
    freeze(request.config, sys.argv, request.overrides, accepts_changes=accepts_changes)
    echo(f"{what} in {run.path}")
    if not is_link:
        remove_stop(run)
        loaded = os.environ.get("LOADEDMODULES", "").split(":")
        wanted = request.config.launch.modules  # a job would load them
        if missing := [name for name in wanted if not any(f"{one}/".startswith(f"{name}/") for one in loaded)]:
            echo(
                f"This shell has not loaded all launch.modules: {', '.join(missing)}. Run `module load "
                f"{' '.join(missing)}`, or use a shell of `hpc-grpo cluster shell --config CONFIG`.",
                err=True,
            )
    words = ["--link", "--by-hand"] if is_link else ["--no-link"]
    become_copy(run, ["attempt", str(run.path), *words, "--driver", driver])
    sys.exit(run_attempt(run, driver, LinkJob(by_hand=True) if is_link else None))


def refuse_wrong_inputs(request: Request, accepts_changes: bool = False) -> None:
    """Raise ConfigError for inputs with which training would fail after Ray's start, unless the run is complete."""
    config = request.config
    if not is_over(RunDir(config.run_path), config):
        for error in refusals([config], request.environ, accepts_changes=accepts_changes, asks_slurm=False):
            raise error
        refuse_unknown_models(config, request.environ)


def run_until_over(command: Sequence[str]) -> int:
    """Run `command`, forward signals, and return its exit code. The command ends when this process ends."""
    sys.stdout.flush()
    code = run_in_foreground(command, own_session=True)  # else Ctrl+C would reach it twice
    return code if code >= 0 else EXIT_CRASH
