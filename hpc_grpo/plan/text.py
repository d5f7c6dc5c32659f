"""Write a plan's memory and disk as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpc_grpo.config.resources import engines_per_node, expects_gpus, gpus_per_node
from hpc_grpo.plan.budgets import is_checkpointed, replayed_bytes
from hpc_grpo.plan.disk import DiskBudget
from hpc_grpo.plan.fit import Plan, changes_that_fit, largest_models, shortfall
from hpc_grpo.plan.memory import ENGINE_GPU, MemoryBudget, Part
from hpc_grpo.plan.step import workload
from hpc_grpo.system.readable import counted, wrapped
from hpc_grpo.types import GIB

_MAX_CHANGES_SHOWN = 6
_NAME_WIDTH = 46


def size_sections(plan: Plan, disk: DiskBudget) -> Iterator[str]:
    """Return the plan's text about memory and disk."""
    sections = [_head(plan), *map(_budget, plan.budgets), _verdict(plan, disk), _step(plan), _sizes(plan), _disk(disk)]
    yield from map("\n".join, sections)


def _head(plan: Plan) -> Iterator[str]:
    config, train, engines = plan.config, plan.config.train, engines_per_node(plan.config)
    yield f"{plan.model.name}: {plan.model.num_parameters:,} parameters ({plan.model.counted_from})"
    learners = config.placement.learners_per_node
    yield f"{counted(plan.num_nodes, 'node')}, each {counted(learners, 'learner')} and {counted(engines, 'engine')}"
    on_gpu = expects_gpus(config)
    checkpointing = "on" if is_checkpointed(config, on_gpu=on_gpu) else "off"
    yield (
        f"ZeRO-{train.zero_stage}, offload {train.offload_optimizer}, gradient checkpointing {checkpointing}, "
        f"{train.max_tokens_per_microbatch:,} tokens a microbatch"
        + (f", shared by {train.sequence_parallel} learners" if train.sequence_parallel > 1 else "")
        + ("" if on_gpu else ", on CPU")
    )
    billions, workers = plan.model.num_parameters / 1e9, counted(plan.num_learners, "learner")
    yield f"P = {billions:.3f}e9 parameters, W = {workers}; all symbols: docs/memory.md"


def _budget(budget: MemoryBudget) -> Iterator[str]:
    yield f"{budget.device:<{_NAME_WIDTH}}     GiB"
    verdict = "fits" if budget.fits else "DOES NOT FIT"
    yield from _sum(budget.parts, f"{budget.capacity_bytes / GIB:.1f}: {verdict}")


def _disk(disk: DiskBudget) -> Iterator[str]:
    yield f"{'disk':<{_NAME_WIDTH}}     GiB  in {disk.folder}"
    verdict = "DOES NOT FIT" if disk.is_too_large else "fits" if disk.fits else "fits if completions stay shorter"
    yield from _sum((*disk.sure, *disk.estimated), f"{disk.room.num_bytes / GIB:,.1f} {disk.room.limit}: {verdict}")


def _sum(parts: Sequence[Part], available: str) -> Iterator[str]:
    for part in (*parts, Part("together", sum(part.num_bytes for part in parts), f"of {available}")):
        yield f"  {part.name:<{_NAME_WIDTH}}{part.num_bytes / GIB:>6.1f}  {part.formula}"


def _verdict(plan: Plan, disk: DiskBudget) -> Iterator[str]:
    if plan.fits:
        slurm, needed = plan.config.launch.slurm, gpus_per_node(plan.config)
        is_unasked = bool(needed) and not slurm.gpus_per_node and not slurm.has_other_gpus
        on_nodes = f" nodes with {counted(needed, 'GPU')} each" if is_unasked else ""
        yield f"It fits{on_nodes}{' in memory, but not on the disk here: see below' if disk.is_too_large else ''}."
        if is_unasked:
            yield from wrapped(
                f"launch.slurm.gpus_per_node = 0 requests no GPU: give `submit` --gpus {needed}, or set "
                f"model.device=cpu. `train` takes the GPUs of its machine."
            )
        for warning in plan.warnings:
            yield from wrapped(warning)
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
    if load is None or cache is None:
        yield f"A step trains on {plan.config.task_args.batch_size:,} demonstrations."
        return
    yield from wrapped(
        f"A step samples {load.num_sequences:,} sequences of at most {plan.config.max_model_len:,} tokens: "
        f"at most {load.max_tokens:,} tokens, {load.max_new_tokens:,} of them sampled."
    )
    if plan.config.environments:
        yield from wrapped(
            f"The model writes at most {plan.config.most_sampled:,} tokens of an episode, in up to "
            f"{plan.config.most_turns} turns. Assumed: an episode is one sequence."
        )
    if each := replayed_bytes(plan.model, plan.config):
        yield from wrapped(
            f"Engines send each token's experts to learners (train.router_replay): {each:,} bytes a token, at most "
            f"{each * load.max_tokens / GIB:.1f} GiB a step. Ray writes to disk what exceeds launch.object_store_gib."
        )
    if factor := plan.config.rollout.dynamic_sampling:
        yield from wrapped(
            f"Up to {factor} times as many if groups are replaced (rollout.dynamic_sampling = {factor}); the "
            f"run's number of steps stays the same."
        )
    if all(budget.fits for budget in plan.budgets if budget.device == ENGINE_GPU):
        at_once = plan.config.engine.max_num_seqs
        preempts = ", and preempts some of them while the cache is full" if cache.num_sequences < at_once else ""
        yield from wrapped(
            f"An engine gets {load.sequences_per_engine:,} of them. Its KV cache takes {cache.bytes_per_token:,} bytes "
            f"a token and GPU and holds {cache.num_tokens:,} tokens: {counted(cache.num_sequences, 'sequence')} of "
            f"full length. It decodes {at_once:,} at once (engine.vllm.max_num_seqs){preempts}."
        )
    yield f"A learner trains on at most {load.num_microbatches:,} microbatches a step."


def _sizes(plan: Plan) -> Iterator[str]:
    plans = largest_models(plan)
    fitting = [size for size, planned in plans if planned.fits]
    yield f"Largest model with these settings, of Qwen2.5's sizes: {fitting[-1] if fitting else 'none of them'}"
    for size, planned in plans:
        yield f"  {size:>5}  " + ("fits" if planned.fits else f"does not fit: {shortfall(planned)}")
