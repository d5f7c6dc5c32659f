"""Simulate a run at several settings, and write what comes of it as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.simulate.cluster import Setting
from hpc_grpo.simulate.forecast import Forecast, forecast, measured_rates
from hpc_grpo.simulate.measured import Measurements
from hpc_grpo.simulate.rates import Rates
from hpc_grpo.system.readable import counted

_AS_GOOD = 0.99
_TITLES = ("nodes", "learners", "engines", "lag", "steps/h", "engines idle", "learners idle", "node-hours")


def settings_of(
    config: Config, nodes: Sequence[int], learners: Sequence[int] | None, lags: Sequence[int] | None
) -> list[Setting]:
    """List the settings asked for; a node's learners and engines share its slots as they do in `config`.

    Raises ConfigError for learners that leave a node no engine.
    """
    own, width = config.placement.learners_per_node, config.engine.tensor_parallel
    shared = config.placement.colocate
    slots = own + config.engine.engines_per_node * width
    if shared and (any(count != own for count in learners or ()) or any(lags or ())):
        raise ConfigError(
            f"placement.colocate has an engine and one of the {counted(own, 'learner')} of a node in turn on each GPU: "
            f"--learners is {own} and --lag 0. Leave both out."
        )
    found = []
    for count in learners or (own,):
        engines = config.engine.engines_per_node if shared else (slots - count) // width
        if engines < 1:
            raise ConfigError(
                f"--learners {count}: a node has {counted(slots, 'place')} for learners and engines, and an engine "
                f"takes {width}. Ask for 1 to {slots - width}, or raise engine.engines_per_node."
            )
        found += [
            Setting(number, count, engines, lag) for number in nodes for lag in lags or (config.rollout.max_policy_lag,)
        ]
    return sorted(found, key=lambda each: (each.nodes, each.learners, each.lag))


def simulation_text(config: Config, measured: Measurements, settings: Sequence[Setting]) -> str:
    """Simulate the run as it was, to compare, and at each of the settings."""
    rates = measured_rates(measured, config)
    (as_it_was,) = settings_of(config, [measured.num_nodes], None, None)
    again = forecast(config, measured.sequences, rates, as_it_was)
    forecasts = [forecast(config, measured.sequences, rates, setting) for setting in settings]
    lines = [
        *_head(measured, rates, again),
        "",
        *_table(forecasts, measured.steps_to_go),
        "",
        *_foot(forecasts, measured),
    ]
    return "\n".join(lines) + "\n"


def _head(measured: Measurements, rates: Rates, again: Forecast) -> Iterator[str]:
    off = again.steps_per_h / measured.steps_per_h - 1
    yield (
        f"{counted(len(measured.steps), 'step')} measured on {counted(measured.num_nodes, 'node')}: "
        f"{measured.steps_per_h:,.1f} steps/h; simulated as it was: {again.steps_per_h:,.1f} ({off:+.1%})"
    )
    decoding, training = rates.decoding, rates.training
    yield f"decode step of n sequences: {decoding.fixed_s * 1e3:.3g} ms + {decoding.part_s * 1e3:.3g} ms n"
    yield f"training on n tokens, in one learner: {training.fixed_s:.3g} s + {training.part_s * 1e6:.3g} µs n"
    if again.setting.lag:
        yield "engines sampled behind training: a decode step takes what makes the simulated run wait as long as it did"


def _table(forecasts: Sequence[Forecast], num_steps: int) -> Iterator[str]:
    best = {id(_best(of_nodes)) for of_nodes in _by_nodes(forecasts)}
    rows = [_TITLES, *(_row(each, num_steps, is_best=id(each) in best) for each in forecasts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(each: Forecast, num_steps: int, *, is_best: bool) -> tuple[str, ...]:
    setting = each.setting
    return (
        f"{'*' if is_best else ''}{setting.nodes}",
        str(setting.learners),
        str(setting.engines),
        str(setting.lag),
        f"{each.steps_per_h:,.1f}",
        f"{each.engines_idle:.0%}",
        f"{each.learners_idle:.0%}",
        f"{each.node_hours(num_steps):,.2f}",
    )


def _foot(forecasts: Sequence[Forecast], measured: Measurements) -> Iterator[str]:
    cheapest = min(forecasts, key=lambda each: each.node_hours(1))
    yield f"node-hours are those of {counted(measured.steps_to_go, 'step')}: {measured.which_steps}."
    yield (
        f"* most steps/h on so many nodes. Fewest node-hours a step: {counted(cheapest.setting.nodes, 'node')}, "
        f"{counted(cheapest.setting.learners, 'learner')} and {counted(cheapest.setting.engines, 'engine')} on each, "
        f"lag {cheapest.setting.lag}."
    )
    yield "Not counted: the network between more nodes than were measured, failures, and cores that both sides share."


def _by_nodes(forecasts: Sequence[Forecast]) -> list[list[Forecast]]:
    numbers = dict.fromkeys(each.setting.nodes for each in forecasts)
    return [[each for each in forecasts if each.setting.nodes == number] for number in numbers]


def _best(forecasts: Sequence[Forecast]) -> Forecast:
    """Return the fastest, or one before it in the table that is as good."""
    enough = _AS_GOOD * max(each.steps_per_h for each in forecasts)
    return next(each for each in forecasts if each.steps_per_h >= enough)
