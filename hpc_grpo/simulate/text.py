"""Write the expected time of a run, before its first step or from its own measurements (`hpc-grpo plan`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.config.resources import expects_gpus, gpus_per_node
from hpc_grpo.errors import ConfigError
from hpc_grpo.plan.disk import read_disk
from hpc_grpo.plan.fit import Change, Plan
from hpc_grpo.plan.step import num_steps
from hpc_grpo.plan.text import size_sections
from hpc_grpo.run.paths import RunDir
from hpc_grpo.simulate import assumed, placement
from hpc_grpo.simulate.assumed import longest_step, mean_tokens, simulated
from hpc_grpo.simulate.cluster import Forecast, Setting, forecast
from hpc_grpo.simulate.measured import MeasuredAttempt, Measurements, measured_rates, newest_attempt
from hpc_grpo.simulate.placement import LAG, changed_settings, fastest_in_turn, layout, ranked_splits
from hpc_grpo.system.readable import UNKNOWN, counted, wrapped

_AS_GOOD = 0.99
_TITLES = ("nodes", "learners", "engines", "lag", "step, s", "steps/h", "engines idle", "learners idle", "node-hours")


def settings_of(
    config: Config, nodes: Sequence[int], learners: Sequence[int] | None, lags: Sequence[int] | None
) -> list[Setting]:
    """List the requested settings. A node has as many slots as in `config`; engines get those without a learner.

    Raises ConfigError if the learners leave no slot for an engine.
    """
    own, width = config.placement.learners_per_node, config.engine.tensor_parallel
    shared = config.placement.colocate
    slots = own + config.engine.engines_per_node * width
    if shared and (any(count != own for count in learners or ()) or any(lags or ())):
        raise ConfigError(
            f"placement.colocate has an engine and one of the {counted(own, 'learner')} of a node in turn on each GPU: "
            f"--learners is {own} and --lag 0. Leave both out."
        )
    found, chosen = list[Setting](), lags or (config.rollout.max_policy_lag,)
    for count in learners or (own,):
        engines = config.engine.engines_per_node if shared else (slots - count) // width
        if engines < 1:
            raise ConfigError(
                f"--learners {count}: a node has {counted(slots, 'place')} for learners and engines, and an engine "
                f"takes {width}. Ask for 1 to {slots - width}, or raise engine.engines_per_node."
            )
        found += [Setting(number, count, engines, lag) for number in nodes for lag in chosen]
    return sorted(found, key=lambda each: (each.nodes, each.learners, each.lag))


def simulation_text(config: Config, measured: Measurements, settings: Sequence[Setting]) -> str:
    """Simulate the run with its own settings, for comparison, and at each of the settings."""
    rates = measured_rates(measured, config)
    (as_it_was,) = settings_of(config, [measured.num_nodes], None, None)
    again = forecast(config, rates, as_it_was).steps_per_h
    off = again / measured.steps_per_h - 1
    found = [forecast(config, rates, setting) for setting in settings]
    decoding, training = rates.decoding, rates.training
    lines = [
        f"{counted(len(measured.steps), 'step')} measured on {counted(measured.num_nodes, 'node')}: "
        f"{measured.steps_per_h:,.1f} steps/h; simulated as it was: {again:,.1f} ({off:+.1%})",
        f"decode step of n sequences: {decoding.fixed_s * 1e3:.3g} ms + {decoding.part_s * 1e3:.3g} ms n",
        f"training on n tokens, in one learner: {training.fixed_s:.3g} s + {training.part_s * 1e6:.3g} µs n",
    ]
    if (sequences := rates.sequences).are_episodes:
        lines.append(f"episodes of {sequences.turns:.3g} turns; an environment takes {sequences.environment_s:.3g} s")
    if as_it_was.lag or sequences.environment_s:
        lines.append(
            "sampling overlapped with training or environments: the decode step is fitted, so that the simulated run "
            "waits as long as the run did"
        )
    cheapest = min(found, key=lambda each: each.node_hours(1))
    best = [_best([each for each in found if each.setting.nodes == number]) for number in {s.nodes for s in settings}]
    rows = [(each, "*" if each in best else "", "") for each in found]
    lines += [
        "",
        *_table(rows, measured.steps_to_go),
        "",
        f"node-hours are those of {counted(measured.steps_to_go, 'step')}: {measured.which_steps}.",
        f"* most steps/h on this number of nodes. Fewest node-hours a step: {counted(cheapest.setting.nodes, 'node')}, "
        f"{counted(cheapest.setting.learners, 'learner')} and {counted(cheapest.setting.engines, 'engine')} on each, "
        f"lag {cheapest.setting.lag}.",
        "Not counted: the network between more nodes than were measured, failures, and cores that both sides share.",
    ]
    return "\n".join(lines) + "\n"


def simulation_facts(config: Config, measured: Measurements, settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the measured steps/h, and the forecast of each setting; node-hours are None if the length is not known."""
    rates, to_go = measured_rates(measured, config), measured.steps_to_go
    return {
        "measured_steps_per_h": measured.steps_per_h,
        "settings": [
            {
                **asdict(each.setting),
                "steps_per_h": each.steps_per_h,
                "engines_idle": each.engines_idle,
                "learners_idle": each.learners_idle,
                "node_hours": each.node_hours(to_go),
            }
            for each in (forecast(config, rates, setting) for setting in settings)
        ],
    }


def _best(forecasts: Sequence[Forecast]) -> Forecast:
    """Return the fastest forecast, or an earlier one in the table that is equally fast."""
    enough = _AS_GOOD * max(each.steps_per_h for each in forecasts)
    return next(each for each in forecasts if each.steps_per_h >= enough)


def _table(rows: Sequence[tuple[Forecast, str, str]], num_steps: int | None) -> Iterator[str]:
    """Write the forecasts, each with its setting and a mark. Node-hours are those of `num_steps`."""
    notes = "ZeRO, offload" if any(note for _, _, note in rows) else ""
    titles = (*_TITLES, notes)
    cells = [
        (
            f"{mark}{each.setting.nodes}",
            str(each.setting.learners),
            f"{each.setting.engines}{f' of {each.setting.width} GPUs' if each.setting.width > 1 else ''}",
            str(each.setting.lag),
            _seconds(each.step_s),
            f"{each.steps_per_h:,.1f}",
            f"{each.engines_idle:.0%}",
            f"{each.learners_idle:.0%}",
            UNKNOWN if num_steps is None else f"{each.node_hours(num_steps):,.2f}",
            note,
        )
        for each, mark, note in rows
    ]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    for row in (titles, *cells):
        *right, note = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield f"{'  '.join(right)}  {note.strip()}".rstrip()


def plan_text(plan: Plan) -> str:
    """Return the text of `hpc-grpo plan`: sizes, then times."""
    measured = newest_attempt(RunDir(plan.config.run_path), plan.config)
    sections = [*size_sections(plan, read_disk([plan])), *time_sections(plan, measured)]
    return "\n\n".join(filter(None, sections)) + "\n"


def time_sections(plan: Plan, measured: MeasuredAttempt | None) -> Iterator[str]:
    """Yield the plan's text about time: from measured steps if there are any, else from assumed rates."""
    yield "\n".join(_measured_time(plan, measured) if measured else _longest_step(plan))
    yield "\n".join(_placement(plan, has_trained=measured is not None))


def _measured_time(plan: Plan, measured: MeasuredAttempt) -> Iterator[str]:
    where = f" on {counted(measured.num_nodes, 'node')}" if measured.num_nodes else ""
    steps = counted(len(measured.lines), "step")
    yield f"Step time: {measured.median_step_s:.1f} s, the median of {steps} of attempt {measured.number}{where}."
    if plan.config.needs.rollouts:
        yield f"On other nodes, splits and lags, from its measurements: hpc-grpo plan {plan.config.run_path}"
    remaining = measured.num_remaining_steps
    if remaining is None:
        yield "Node-hours left: not known, because the run's length in steps is not known (train.total_epochs)."
        return
    left = remaining * measured.median_step_s * (measured.num_nodes or plan.num_nodes) / 3600
    yield f"Node-hours left: {left:.1f}, for {counted(remaining, 'step')}."
    if expects_gpus(plan.config):
        yield f"GPU-hours left: {left * gpus_per_node(plan.config):.1f}."
    if measured.num_nodes and measured.num_nodes != plan.num_nodes:
        yield f"  (on {counted(measured.num_nodes, 'node')}; how it changes with {plan.num_nodes} was not measured)"


def _longest_step(plan: Plan) -> Iterator[str]:
    found, steps, hardware, rollout = longest_step(plan), num_steps(plan), plan.hardware, plan.config.rollout
    if found is None:
        yield "Step time: not known until a step of this run was measured."
        return
    sample_s, train_s = found
    gpus = plan.num_nodes * gpus_per_node(plan.config)

    def step_s(rounds: int = 1) -> float:
        return max(rounds * sample_s, train_s) if rollout.max_policy_lag else rounds * sample_s + train_s

    side_by_side = ", side by side" if rollout.max_policy_lag else ""
    yield from wrapped(
        f"Step time: about {_seconds(step_s())} s (sampling {_seconds(sample_s)} s, training {_seconds(train_s)} "
        f"s{side_by_side}), expected and not measured: every sequence as long as it may be, at "
        f"{assumed.TRAINING_SHARE:.0%} of {hardware.gpu_flops_per_s / 1e12:.0f} TFLOP/s and "
        f"{assumed.READING_SHARE:.0%} of {hardware.gpu_bytes_per_s / 1e12:.1f} TB/s a GPU."
    )
    if steps is not None:
        yield f"GPU-hours: about {steps * step_s() * gpus / 3600:,.0f}, for {counted(steps, 'step')}."
    if (bound := rollout.dynamic_sampling or 1) > 1:
        worst_s = step_s(bound)
        hours = f", {steps * worst_s * gpus / 3600:,.0f} GPU-hours" if steps is not None else ""
        yield from wrapped(
            f"With the most that rollout.dynamic_sampling = {bound} may sample: {_seconds(worst_s)} s a step{hours}. "
            f"Placements do not include this."
        )


def _placement(plan: Plan, *, has_trained: bool) -> Iterator[str]:
    splits, config = ranked_splits(plan), plan.config
    lag, minibatches = config.rollout.max_policy_lag, config.train.num_minibatches
    lags = [0] if config.placement.colocate else sorted({0, minibatches, lag})
    ours = [found for each in lags if plan.fits and (found := simulated(plan, each))]
    if not splits and not ours:
        return
    mean, longest = mean_tokens(config), config.most_sampled
    pause = f"{assumed.ENVIRONMENT_S:g} s of its environment on average"
    played = f" Episodes have {config.most_turns} turns, each with {pause}."
    share = "what an episode may sample" if config.environments else "rollout.max_new_tokens"
    yield from wrapped(
        f"Placements of {counted(plan.num_nodes, 'node')}, each with the ZeRO stage and offload that suit it best, "
        f"simulated with the driver's own scheduler. Lengths are assumed: lognormal with sigma 1, {mean:,} tokens on "
        f"average ({assumed.MEAN_SHARE:.0%} of {share}), cut at {longest:,}.{played if config.environments else ''}"
    )
    rows = [(found, "", f"{_zero(plan)}, this config's") for found in ours]
    for split in splits:
        if ours and {key for key, _ in changed_settings(plan, split.plan)} <= {LAG}:
            continue
        note = f"{_zero(split.plan)}{', the default' if layout(split.plan) == placement.CARD_DEFAULT else ''}"
        rows += [(split.in_turn, "", note), (split.ahead, "", note)]
    yield from (f"  {line}" for line in _table(rows, num_steps(plan)))
    if not splits:
        return
    best = splits[0]
    own = next((found for found in ours if found.setting.lag == lag), None)
    if own and own.step_s <= placement.CLOSE * best.ahead.step_s:
        faster = f"none is faster by {placement.CLOSE - 1:.0%}"
        yield f"Recommended: this config's own, {_seconds(own.step_s)} s a step; {faster}."
    else:
        here = f"this config's takes {_seconds(own.step_s)} s" if own else "this config's does not fit"
        yield f"Recommended, {_seconds(best.ahead.step_s)} s a step ({here}):"
        yield f"  {Change(changed_settings(plan, best.plan), plan.num_nodes).text}"
    if has_trained:
        yield "A run that has trained may change learners and engines, not the ZeRO stage, the offload or the lag."
    in_turn = fastest_in_turn(splits)
    learners, engines, width = layout(in_turn.plan)
    yield from wrapped(
        f"In turn ({LAG}=0: no rollout is older than the weights it trains) {learners} + {engines}"
        f"{f' of {width} GPUs' if width > 1 else ''} is the fastest, {_seconds(in_turn.in_turn.step_s)} s."
    )
    yield from (line for warning in best.plan.warnings for line in wrapped(warning))


def _zero(plan: Plan) -> str:
    return f"{plan.config.train.zero_stage}, {plan.config.train.offload_optimizer}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"
