"""Preflight: what would go wrong on this cluster, before a job finds out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_grpo.cli.options import OVERRIDES, SET
from hpc_grpo.errors import EXIT_CONFIG, ConfigError

if TYPE_CHECKING:
    from hpc_grpo.preflight.findings import Context


@click.command()
@click.argument("optional_config", metavar="[CONFIG]", required=False)
@OVERRIDES
@SET
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Examine N nodes; on a login node in a short job.")
@click.option(
    "--wait-min",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="MIN",
    help="Wait so long for the job of --nodes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of findings.")
@click.option("--result", type=click.Path(path_type=Path), hidden=True, help="In the job of --nodes: where to write.")
def doctor(
    optional_config: str | None,
    overrides: tuple[str, ...],
    sets: tuple[str, ...],
    nodes: int | None,
    wait_min: float,
    as_json: bool,
    result: Path | None,
) -> None:
    """Check config, Slurm, nodes, network and GPUs before a run; each failure names its fix.

    On a login node it checks what can be seen from there, with --nodes N also N compute nodes, in a job of at most
    5 minutes. In an allocation it examines its nodes. Ends with 78 where a check failed.
    """
    import time

    from hpc_grpo.preflight.diagnosis import diagnose, diagnose_in_job
    from hpc_grpo.preflight.findings import has_failure, report_text, to_json
    from hpc_grpo.run.files import write_atomic

    if sets and optional_config is None:
        raise ConfigError("--set changes a key of CONFIG: name one, such as local/demo_grpo.")
    begun = time.monotonic()
    context = _context(optional_config, [*sets, *overrides])
    if result is not None:
        groups = diagnose_in_job(context)
        write_atomic(result, to_json(groups))
    else:
        groups = diagnose(context, nodes, wait_min, tell=lambda text: click.echo(text, err=True))
    took_s = time.monotonic() - begun
    click.echo(to_json(groups) if as_json else report_text(groups, took_s), nl=as_json)
    if has_failure(groups):
        sys.exit(EXIT_CONFIG)


def _context(optional_config: str | None, overrides: list[str]) -> Context:
    """Resolve what the checks look at; a config that does not load is a finding, not an error."""
    import os

    from hpc_grpo.cli.request import load_request
    from hpc_grpo.config import LaunchConfig
    from hpc_grpo.preflight.findings import Context

    if optional_config is None:
        return Context(None, LaunchConfig(), os.environ)
    try:
        request = load_request(optional_config, overrides)
    except ConfigError as error:
        return Context(None, LaunchConfig(), os.environ, str(error))
    return Context(request.config, request.config.launch, request.environ)


COMMANDS = (doctor,)
