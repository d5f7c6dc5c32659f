"""Write a plan as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from hpc_grpo.config import Config
from hpc_grpo.config.resources import engines_per_node, expects_gpus, gpus_per_node
from hpc_grpo.errors import ConfigError
from hpc_grpo.plan.advise import Change, changes_that_fit, largest_models, shortfall
from hpc_grpo.plan.disk import DiskBudget, read_disk
from hpc_grpo.plan.expected import READING_SHARE, TRAINING_SHARE, expected_step
from hpc_grpo.plan.fit import Plan, plan_of
from hpc_grpo.plan.learner_memory import is_checkpointed
from hpc_grpo.plan.memory import ENGINE_GPU, GH200, MemoryBudget
from hpc_grpo.plan.placement import CARD_DEFAULT, CLOSE, Split, changed_settings, fastest_in_turn, ranked_splits
from hpc_grpo.plan.step import MeasuredSteps, num_steps, read_measured_steps, workload
from hpc_grpo.system.readable import counted
from hpc_grpo.types import GIB

_MAX_CHANGES_SHOWN = 6
_NAME_WIDTH = 46
_LINE_WIDTH = 100


def plan_text(plan: Plan, measured: MeasuredSteps | None, disk: DiskBudget | None = None) -> str:
    sections = [_head(plan), *map(_budget, plan.budgets), _verdict(plan), _step(plan), _sizes(plan)]
    sections += [_disk(disk)] if disk else []
    sections += [_time(plan, measured), _placement(plan, has_trained=measured is not None)]
    return "\n\n".join(filter(None, map("\n".join, sections))) + "\n"


def plan_or_reason(config: Config, environ: Mapping[str, str]) -> str:
    """Return the plan on the hardware that `hpc-grpo plan` assumes, else one line that says why there is none."""
    try:
        plan = plan_of(config, environ, GH200)
        text = plan_text(plan, read_measured_steps(config), read_disk(plan))
    except ConfigError as error:
        return f"No plan: {' '.join(str(error).split())}\n"
    assumed = f"{GH200.gpu_bytes // GIB} GiB on each GPU and {GH200.host_bytes // GIB} GiB of a node's memory"
    return f"Plan, assuming {assumed}; `hpc-grpo plan` takes other values.\n\n{text}"


def _head(plan: Plan) -> Iterator[str]:
    config, train, engines = plan.config, plan.config.train, engines_per_node(plan.config)
    yield f"{plan.model.name}: {plan.model.num_parameters:,} parameters ({plan.model.counted_from})"
    learners = config.placement.learners_per_node
    yield f"{counted(plan.num_nodes, 'node')}, each {counted(learners, 'learner')} and {counted(engines, 'engine')}"
    on_gpu = expects_gpus(config)
    checkpointing = "on" if is_checkpointed(config, on_gpu=on_gpu) else "off"
    yield (
        f"ZeRO-{train.zero_stage}, offload {train.offload_optimizer}, gradient checkpointing {checkpointing}, "
        f"{train.max_tokens_per_microbatch:,} tokens a microbatch" + ("" if on_gpu else ", on CPU")
    )
    billions, workers = plan.model.num_parameters / 1e9, counted(plan.num_learners, "learner")
    yield f"P = {billions:.3f}e9 parameters, W = {workers}; all symbols: docs/memory.md"


def _budget(budget: MemoryBudget) -> Iterator[str]:
    yield f"{budget.device:<{_NAME_WIDTH}}     GiB"
    for part in budget.parts:
        yield f"  {part.name:<{_NAME_WIDTH}}{part.num_bytes / GIB:>6.1f}  {part.formula}"
    verdict = "fits" if budget.fits else "DOES NOT FIT"
    total = f"  {'together':<{_NAME_WIDTH}}{budget.num_bytes / GIB:>6.1f}"
    yield f"{total}  of {budget.capacity_bytes / GIB:.1f}: {verdict}"


def _disk(disk: DiskBudget) -> Iterator[str]:
    yield f"{'disk':<{_NAME_WIDTH}}     GiB  in {disk.folder}"
    for part in (*disk.sure, *disk.estimated):
        yield f"  {part.name:<{_NAME_WIDTH}}{part.num_bytes / GIB:>6.1f}  {part.formula}"
    verdict = "DOES NOT FIT" if disk.is_too_large else "fits" if disk.fits else "fits if completions stay shorter"
    total = f"  {'together':<{_NAME_WIDTH}}{disk.num_bytes / GIB:>6.1f}"
    yield f"{total}  of {disk.room.num_bytes / GIB:,.1f} {disk.room.limit}: {verdict}"


def _verdict(plan: Plan) -> Iterator[str]:
    if plan.fits:
        yield "It fits."
        for warning in plan.warnings:
            yield from _wrapped(warning)
        return
    yield "It does not fit:"
    yield from (f"  {problem}" for problem in plan.problems)
    changes = changes_that_fit(plan)
    if not changes:
        yield "No change of one to three settings and no number of nodes up to 256 makes it fit: take a smaller model."
        return
    yield "It fits with any one of:"
    here = [change for change in changes if change.num_nodes == plan.num_nodes][:_MAX_CHANGES_SHOWN]
    for change in [*here, *(change for change in changes if change.num_nodes > plan.num_nodes)]:
        nodes = [f"--nodes {change.num_nodes}"] if change.num_nodes != plan.num_nodes else []
        yield "  " + " ".join([*([change.text] if change.text else []), *nodes])


def _step(plan: Plan) -> Iterator[str]:
    load, cache = workload(plan), plan.kv_cache
    if load.max_tokens is None or cache is None:
        yield f"A step trains on {load.num_sequences:,} demonstrations."
        return
    yield from _wrapped(
        f"A step samples {load.num_sequences:,} sequences of at most {plan.config.max_model_len:,} tokens: "
        f"at most {load.max_tokens:,} tokens, {load.max_new_tokens:,} of them sampled."
    )
    if factor := plan.config.rollout.dynamic_sampling:
        yield from _wrapped(
            f"Up to {factor} times as many where groups are replaced (rollout.dynamic_sampling = {factor}); the "
            f"run has as many steps as without."
        )
    if all(budget.fits for budget in plan.budgets if budget.device == ENGINE_GPU):
        yield from _wrapped(
            f"An engine gets {load.sequences_per_engine:,} of them. Its KV cache takes {cache.bytes_per_token:,} bytes "
            f"a token and GPU and holds {cache.num_tokens:,} tokens: {counted(cache.num_sequences, 'sequence')} of "
            f"full length. {load.running_sequences:,} of these run at once (engine.max_num_seqs: "
            f"{plan.config.engine.max_num_seqs:,})."
        )
    yield f"A learner trains on at most {load.num_microbatches:,} microbatches a step."


def _sizes(plan: Plan) -> Iterator[str]:
    plans = largest_models(plan)
    fitting = [size for size, planned in plans if planned.fits]
    yield f"Largest model with these settings, of Qwen2.5's sizes: {fitting[-1] if fitting else 'none of them'}"
    for size, planned in plans:
        yield f"  {size:>5}  " + ("fits" if planned.fits else f"does not fit: {shortfall(planned)}")


def _time(plan: Plan, measured: MeasuredSteps | None) -> Iterator[str]:
    if measured is None:
        yield from _expected_time(plan)
        return
    where = f" on {counted(measured.num_nodes, 'node')}" if measured.num_nodes else ""
    yield (
        f"Step time: {measured.median_step_s:.1f} s, the median of {counted(measured.num_steps, 'step')} of attempt "
        f"{measured.attempt}{where}."
    )
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
    yield from _wrapped(
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
        yield from _wrapped(
            f"With all that {bound} may sample: {_seconds(worst.step_s)} s a step{hours}. Placements are without that."
        )


def _placement(plan: Plan, *, has_trained: bool) -> Iterator[str]:
    splits, step = ranked_splits(plan), expected_step(plan)
    if not splits:
        return
    best, lag = splits[0], splits[0].plan.config.rollout.max_policy_lag
    yield f"Placements of {counted(plan.num_nodes, 'node')}, each with the ZeRO stage and offload that suit it best:"
    yield f"  {'learners + engines a node':<28}{'ZeRO, offload':<16}{'step in turn, s':>16}{f'at lag {lag}, s':>16}"
    yield from map(_split_row, splits)
    here = f"this config's takes {_seconds(step.step_s)} s" if plan.fits and step else "this config's does not fit"
    if plan.fits and step and step.step_s < best.step.step_s * CLOSE:
        yield f"Recommended: this config's own, {_seconds(step.step_s)} s a step; none is faster by {CLOSE - 1:.0%}."
    else:
        yield f"Recommended, {_seconds(best.step.step_s)} s a step ({here}):"
        yield f"  {Change(changed_settings(plan, best), plan.num_nodes).text}"
    if has_trained:
        yield "A run that has trained may change learners and engines, not the ZeRO stage, the offload or the lag."
    in_turn = fastest_in_turn(splits)
    yield from _wrapped(
        f"In turn (rollout.max_policy_lag=0: no rollout is older than the weights it trains) {_layout(in_turn)} is the "
        f"fastest, {_seconds(in_turn.step.in_turn_s)} s. Completions shorter than the longest favour engines."
    )
    yield from (line for warning in best.plan.warnings for line in _wrapped(warning))


def _split_row(split: Split) -> str:
    stage, offload = split.zero
    step, note = split.step, "  the default" if split.layout == CARD_DEFAULT else ""
    times = f"{_seconds(step.in_turn_s):>16}{_seconds(step.ahead_s):>16}"
    return f"  {_layout(split):<28}{f'{stage}, {offload}':<16}{times}{note}"


def _layout(split: Split) -> str:
    learners, engines, parallel = split.layout
    return f"{learners} + {engines}" + (f" of {parallel} GPUs" if parallel > 1 else "")


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _LINE_WIDTH)
