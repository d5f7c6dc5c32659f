"""Write what a plan says of time: of a step, of placements, and of what the driver's scheduler makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from hpc_grpo.config.resources import expects_gpus, gpus_per_node
from hpc_grpo.plan.advise import Change
from hpc_grpo.plan.expected import READING_SHARE, TRAINING_SHARE, expected_step
from hpc_grpo.plan.fit import Plan
from hpc_grpo.plan.placement import (
    CARD_DEFAULT,
    CLOSE,
    LAG,
    Split,
    changed_settings,
    fastest_in_turn,
    ranked_splits,
    recommended,
)
from hpc_grpo.plan.scheduled import MEAN_SHARE, faster_with_tail, mean_tokens, scheduled_steps
from hpc_grpo.plan.step import MeasuredSteps, num_steps
from hpc_grpo.system.readable import counted, wrapped


def time_sections(plan: Plan, measured: MeasuredSteps | None) -> list[Iterator[str]]:
    splits = ranked_splits(plan)
    if measured is not None:
        return [_measured_time(plan, measured), _placement(plan, splits, has_trained=True)]
    return [_expected_time(plan), _placement(plan, splits, has_trained=False), _schedule(plan, splits)]


def _measured_time(plan: Plan, measured: MeasuredSteps) -> Iterator[str]:
    where = f" on {counted(measured.num_nodes, 'node')}" if measured.num_nodes else ""
    yield (
        f"Step time: {measured.median_step_s:.1f} s, the median of {counted(measured.num_steps, 'step')} of attempt "
        f"{measured.attempt}{where}."
    )
    if plan.config.needs.rollouts:
        yield f"On other nodes, splits and lags, as it measured itself: hpc-grpo simulate {plan.config.run_path}"
    left = measured.node_hours_left(plan.num_nodes)
    if left is None or measured.num_remaining_steps is None:
        yield "Node-hours left: not known, since the length of the run is not (train.total_epochs)."
        return
    yield f"Node-hours left: {left:.1f}, for {counted(measured.num_remaining_steps, 'step')}."
    if expects_gpus(plan.config):
        yield f"GPU-hours left: {left * gpus_per_node(plan.config):.1f}."
    if measured.num_nodes and measured.num_nodes != plan.num_nodes:
        yield f"  (on {counted(measured.num_nodes, 'node')}; how it changes with {plan.num_nodes} was not measured)"


def _expected_time(plan: Plan) -> Iterator[str]:
    expected, steps, hardware = expected_step(plan), num_steps(plan), plan.hardware
    if expected is None:
        yield "Step time: not known until a step of this run was measured."
        return
    side_by_side = ", side by side" if expected.overlaps else ""
    yield from wrapped(
        f"Step time: about {_seconds(expected.step_s)} s (sampling {_seconds(expected.sample_s)} s, training "
        f"{_seconds(expected.train_s)} s{side_by_side}), expected and not measured: every "
        f"sequence as long as it may be, at {TRAINING_SHARE:.0%} of {hardware.gpu_flops_per_s / 1e12:.0f} TFLOP/s and "
        f"{READING_SHARE:.0%} of {hardware.gpu_bytes_per_s / 1e12:.1f} TB/s a GPU."
    )
    if steps is not None:
        yield f"GPU-hours: about {expected.gpu_hours(steps):,.0f}, for {counted(steps, 'step')}."
    if expected.most_rounds > 1:
        worst, bound = expected.at_worst, f"rollout.dynamic_sampling = {expected.most_rounds}"
        hours = f", {worst.gpu_hours(steps):,.0f} GPU-hours" if steps is not None else ""
        yield from wrapped(
            f"With all that {bound} may sample: {_seconds(worst.step_s)} s a step{hours}. Placements are without that."
        )


def _placement(plan: Plan, splits: Sequence[Split], *, has_trained: bool) -> Iterator[str]:
    if not splits:
        return
    step, best, lag = expected_step(plan), splits[0], splits[0].plan.config.rollout.max_policy_lag
    yield f"Placements of {counted(plan.num_nodes, 'node')}, each with the ZeRO stage and offload that suit it best:"
    yield f"  {'learners + engines a node':<28}{'ZeRO, offload':<16}{'step in turn, s':>16}{f'at lag {lag}, s':>16}"
    yield from map(_split_row, splits)
    here = f"this config's takes {_seconds(step.step_s)} s" if plan.fits and step else "this config's does not fit"
    if step and recommended(plan, splits) is None:
        yield f"Recommended: this config's own, {_seconds(step.step_s)} s a step; none is faster by {CLOSE - 1:.0%}."
    else:
        yield f"Recommended, {_seconds(best.step.step_s)} s a step ({here}):"
        yield f"  {Change(changed_settings(plan, best), plan.num_nodes).text}"
    if has_trained:
        yield "A run that has trained may change learners and engines, not the ZeRO stage, the offload or the lag."
    in_turn = fastest_in_turn(splits)
    yield from wrapped(
        f"In turn ({LAG}=0: no rollout is older than the weights it trains) {_layout(in_turn.plan)} is the "
        f"fastest, {_seconds(in_turn.step.in_turn_s)} s. Completions shorter than the longest favour engines."
    )
    yield from (line for warning in best.plan.warnings for line in wrapped(warning))


def _schedule(plan: Plan, splits: Sequence[Split]) -> Iterator[str]:
    plans = [(f"{_layout(plan)}, this config's", plan)] if plan.fits else []
    best = recommended(plan, splits) if splits else None
    if best and any(key != LAG for key, _ in changed_settings(plan, best)):
        plans.append((f"{_layout(best.plan)}, recommended", best.plan))
    plans = [(name, each) for name, each in plans if expected_step(each)]
    if not plans:
        return
    if find_spec("ray") is None:
        yield "What completions of unlike lengths cost is simulated where Ray is installed; here it is not."
        return
    mean, longest = mean_tokens(plan.config), plan.config.rollout.max_new_tokens
    yield from wrapped(
        f"What the driver's own scheduler makes of unlike lengths, simulated at the same rates. They are assumed: "
        f"lognormal with sigma 1, {mean:,} tokens on average ({MEAN_SHARE:.0%} of rollout.max_new_tokens), cut at "
        f"{longest:,}. Even: a step in which all completions have {mean:,}."
    )
    titles = f"{'lag':>3}{'step, s':>11}{'engines idle':>15}{'learners idle':>16}{'even, s':>11}"
    yield f"  {'learners + engines a node':<34}{titles}"
    steps = [(name, step) for name, each in plans for step in scheduled_steps(each)]
    for name, step in steps:
        found, even_s = step.with_tail, step.even.step_s
        idle = f"{found.engines_idle:>15.0%}{found.learners_idle:>16.0%}"
        yield f"  {name:<34}{step.lag:>3}{_seconds(found.step_s):>11}{idle}{_seconds(even_s):>11}"
    if splits:
        _, advised = steps[-1]
        yield from _faster_with_tail(plan, splits, advised.with_tail.step_s)


def _faster_with_tail(plan: Plan, splits: Sequence[Split], step_s: float) -> Iterator[str]:
    faster = faster_with_tail(plan, splits, step_s)
    if faster is None:
        yield f"With these lengths no other placement is faster by {CLOSE - 1:.0%}."
        return
    split, forecast = faster
    settings = changed_settings(plan, split)
    found = f"{_layout(split.plan)} is faster, {_seconds(forecast.step_s)} s a step"
    if settings:
        yield f"With these lengths {found}:"
        yield f"  {Change(settings, plan.num_nodes).text}"
    else:
        yield f"With these lengths this config's own {found}."


def _split_row(split: Split) -> str:
    stage, offload = split.zero
    step, note = split.step, "  the default" if split.layout == CARD_DEFAULT else ""
    times = f"{_seconds(step.in_turn_s):>16}{_seconds(step.ahead_s):>16}"
    return f"  {_layout(split.plan):<28}{f'{stage}, {offload}':<16}{times}{note}"


def _layout(plan: Plan) -> str:
    learners, engine = plan.config.placement.learners_per_node, plan.config.engine
    wide = f" of {engine.tensor_parallel} GPUs" if engine.tensor_parallel > 1 else ""
    return f"{learners} + {engine.engines_per_node}{wide}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"
