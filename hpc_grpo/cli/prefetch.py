"""Filling the caches of a run on the login node."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from hpc_grpo.cli.options import CONFIG, OVERRIDES, SET
from hpc_grpo.errors import EXIT_CONFIG

if TYPE_CHECKING:
    from hpc_grpo.preflight.prefetch.command import Outcome

_NAME_WIDTH = 48


@click.command()
@CONFIG
@OVERRIDES
@SET
@click.option("--verify-only", is_flag=True, help="Fetch nothing; say whether the job would find everything.")
def prefetch(config_name: str, overrides: tuple[str, ...], sets: tuple[str, ...], verify_only: bool) -> None:
    """Fetch the model and the data sets of a run on the login node, and verify them with the network off.

    Fills the caches that the job will use (HF_HOME of launch.env counts). Paths on disk are only verified.
    Ends with 78 when the job would miss something.
    """
    from hpc_grpo.cli.request import load_request
    from hpc_grpo.preflight.prefetch.command import prefetch as fill_caches

    request = load_request(config_name, [*sets, *overrides])
    is_complete = True
    for outcome in fill_caches(request.config, request.environ, verify_only=verify_only):
        if outcome.error is None:
            click.echo(_line(outcome))
        else:
            is_complete = False
            click.echo(f"error: {outcome.error}", err=True)
    if not is_complete:
        sys.exit(EXIT_CONFIG)


def _line(outcome: Outcome) -> str:
    item = outcome.item
    return f"{item!s:<{_NAME_WIDTH}}  {_size(outcome.num_bytes):>10}  verified  {outcome.folder}"


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"


COMMANDS = (prefetch,)
