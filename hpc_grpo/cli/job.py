"""The commands that job scripts run, hidden from users."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hpc_grpo.cli.options import CONFIG_OR_RUN, DRIVER, OVERRIDES, STARTS_RUN, echo
from hpc_grpo.cli.request import load_request_or_run
from hpc_grpo.launch.chain.link import LinkJob
from hpc_grpo.launch.place.job_queue import setup_lines
from hpc_grpo.launch.supervisor.attempt import run_attempt
from hpc_grpo.run.evals import ANSWER
from hpc_grpo.run.paths import CELLS, RunDir


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
