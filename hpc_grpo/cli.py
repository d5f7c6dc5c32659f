"""The `hpc-grpo` command. Each command imports what it needs, so that `--help` answers at once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_grpo import __version__
from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.launch import DEFAULT_DRIVER

if TYPE_CHECKING:
    from hpc_grpo.run_dir import RunDir


class _Group(click.Group):
    """Shows an HpcGrpoError as one message, and ends with its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HpcGrpoError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hpc-grpo")
def main() -> None:
    """GRPO post-training of language models as a Slurm job that survives."""


_SET = click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key of the config, such as train.lr=1e-6."
)

_DRIVER = click.option("--driver", hidden=True, default=DEFAULT_DRIVER, help="Module or .py file; for tests.")


@main.command()
@click.argument("config_name", metavar="CONFIG")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@_SET
@_DRIVER
def train(config_name: str, overrides: tuple[str, ...], sets: tuple[str, ...], driver: str) -> None:
    """Train here: on this machine, or on all nodes of the Slurm allocation this shell is in.

    CONFIG is a .yaml file, a .sh file that sets TRAINING_ARGS, or the name of a shipped config. The same
    command resumes a run that was interrupted.
    """
    from hpc_grpo.launch.freeze import freeze
    from hpc_grpo.launch.request import load_request

    request = load_request(config_name, [*sets, *overrides])
    os.environ.update(request.environment)
    frozen = freeze(request.config, sys.argv, request.overrides)
    click.echo(f"{'New run' if frozen.is_new else 'Resuming run'} in {frozen.run.path}")
    sys.exit(_attempt(frozen.run, driver))


@main.command()
@click.argument("config_name", metavar="CONFIG")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@_SET
@click.option("--nodes", type=click.IntRange(1), help="launch.slurm.num_nodes")
@click.option("--time", "time_min", type=click.IntRange(1), metavar="MIN", help="launch.slurm.time_min")
@click.option("--partition", help="launch.slurm.partition")
@click.option("--account", help="launch.slurm.account")
@click.option("--dry-run", is_flag=True, help="Print the job script and do nothing.")
@_DRIVER
def submit(
    config_name: str, overrides: tuple[str, ...], sets: tuple[str, ...], dry_run: bool, driver: str, **options: Any
) -> None:
    """Submit a run as a Slurm job and return. The same command resumes a run that was interrupted."""
    from hpc_grpo.launch import slurm
    from hpc_grpo.launch.freeze import freeze
    from hpc_grpo.launch.request import load_request
    from hpc_grpo.run_dir import RunDir

    keys = {"nodes": "num_nodes"}
    given = {keys.get(key, key): json.dumps(value) for key, value in options.items() if value is not None}
    chosen = [f"launch.slurm.{key}={value}" for key, value in given.items()]
    request = load_request(config_name, [*sets, *overrides, *chosen])
    if dry_run:
        run = RunDir(request.config.run_path.absolute())
        click.echo(slurm.render(request.config.launch, run, slurm.attempt_command(run, driver)), nl=False)
        return
    os.environ.update(request.environment)
    slurm.parameters(request.config.launch, RunDir(request.config.run_path))
    frozen = freeze(request.config, sys.argv, request.overrides)
    if frozen.run.is_complete():
        click.echo(f"The run in {frozen.run.path} is already complete; raise train.total_* to extend it.")
        return
    job_id = slurm.submit(frozen.config.launch, frozen.run, slurm.attempt_command(frozen.run, driver))
    click.echo(f"Submitted job {job_id} for {'new run' if frozen.is_new else 'run'} {frozen.run.path}")
    click.echo(f"  follow its log:  tail -F {slurm.log_path(frozen.run, job_id)}")
    click.echo(f"  stop it:         scancel {job_id}")


@main.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
@_DRIVER
def attempt(run_dir: Path, driver: str) -> None:
    """Run one attempt of a frozen run: what a submitted job executes."""
    from hpc_grpo.run_dir import RunDir

    sys.exit(_attempt(RunDir(run_dir.absolute()), driver))


@main.command("job-setup", hidden=True)
@click.argument("config_name", metavar="CONFIG")
@click.argument("overrides", nargs=-1)
@_SET
@_DRIVER
def job_setup(config_name: str, overrides: tuple[str, ...], sets: tuple[str, ...], driver: str) -> None:
    """Print the shell lines a job runs first: for sbatch/grpo_rlzero.sbatch, which takes what `train` takes."""
    from hpc_grpo.launch.request import load_request
    from hpc_grpo.launch.slurm import setup_lines

    for line in setup_lines(load_request(config_name, [*sets, *overrides]).config.launch):
        click.echo(line)


def _attempt(run: RunDir, driver: str) -> int:
    from hpc_grpo.launch.attempt import run_attempt

    return run_attempt(run, driver)


@main.command()
@click.argument("config_name", metavar="CONFIG")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@_SET
@click.option("--yaml", "as_yaml", is_flag=True, help="Print only the resolved YAML.")
def config(config_name: str, overrides: tuple[str, ...], sets: tuple[str, ...], as_yaml: bool) -> None:
    """Print every key of a config: its value, its default and what it means."""
    from hpc_grpo.config import to_yaml
    from hpc_grpo.config.describe import describe
    from hpc_grpo.launch.request import load_request

    resolved = load_request(config_name, [*sets, *overrides]).config
    click.echo(to_yaml(resolved) if as_yaml else describe(resolved), nl=False)


@main.command("report")
@click.argument("run_dir", type=click.Path(path_type=Path))
def show_report(run_dir: Path) -> None:
    """Plot what a run has learned, in the terminal and as report.png, with completions before and after."""
    from hpc_grpo.metrics.report import report
    from hpc_grpo.run_dir import RunDir

    report(RunDir(run_dir))


if __name__ == "__main__":
    main(prog_name="hpc-grpo")
