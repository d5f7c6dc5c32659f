"""Showing a config before a run, and what a run has learned after it."""

from __future__ import annotations

from pathlib import Path

import click

from hpc_grpo.cli.options import CONFIG, OVERRIDES, SET


@click.command()
@CONFIG
@OVERRIDES
@SET
@click.option("--yaml", "as_yaml", is_flag=True, help="Print only the resolved YAML.")
def config(config_name: str, overrides: tuple[str, ...], sets: tuple[str, ...], as_yaml: bool) -> None:
    """Print every key of a config: its value, its default and what it means."""
    from hpc_grpo.cli.request import load_request
    from hpc_grpo.config import to_yaml
    from hpc_grpo.config.describe import describe

    resolved = load_request(config_name, [*sets, *overrides]).config
    click.echo(to_yaml(resolved) if as_yaml else describe(resolved), nl=False)


@click.command("report")
@click.argument("run_dir", type=click.Path(path_type=Path))
def report(run_dir: Path) -> None:
    """Plot what a run has learned, in the terminal and as report.png, with completions before and after."""
    from hpc_grpo.report.curves import report as write_report
    from hpc_grpo.run.paths import RunDir

    write_report(RunDir(run_dir))


COMMANDS = (config, report)
