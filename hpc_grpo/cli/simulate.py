"""The command that asks what a run would take elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import click

from hpc_grpo.cli.options import RUN, echo, find_run
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.simulate.measured import read_measurements
from hpc_grpo.simulate.text import settings_of, simulation_text


def _numbers(least: int) -> Callable[[click.Context, click.Parameter, str | None], tuple[int, ...] | None]:
    """Return the callback of an option that takes whole numbers of at least `least`, with commas between them."""

    def parse(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        words = [word.strip() for word in value.split(",")]
        if not all(word.isdecimal() and int(word) >= least for word in words):
            raise click.BadParameter(f"{value!r}: give whole numbers of at least {least}, such as 2,8,64.")
        return tuple(dict.fromkeys(map(int, words)))

    return parse


@click.command()
@RUN
@click.option("--nodes", default="1,2,4,8", show_default=True, callback=_numbers(1), metavar="N,…", help="Nodes.")
@click.option("--learners", callback=_numbers(1), metavar="N,…", help="Learners of a node; engines take the rest.")
@click.option("--lag", "lags", callback=_numbers(0), metavar="N,…", help="rollout.max_policy_lag.")
def simulate(
    run_name: str, nodes: tuple[int, ...], learners: tuple[int, ...] | None, lags: tuple[int, ...] | None
) -> None:
    """Say what a run would take elsewhere: steps/h, idle shares and node-hours on other nodes, splits and lags.

    The driver's own loop and scheduler run on simulated clocks, fed with the lengths and times that the run has
    measured. Options left out are as the run has them. Needs the installation that trains, and no nodes.
    """
    run = find_run(run_name)
    config = read_config(run)
    settings = settings_of(config, nodes, learners, lags)
    echo(simulation_text(config, read_measurements(run, config), settings), nl=False)
