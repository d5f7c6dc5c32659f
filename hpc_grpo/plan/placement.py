"""Rank placements: how many of a node's GPUs learn and how many sample, under which ZeRO stage, with which offload.

Nothing is guessed: every split was planned, and only what fits is ranked, by the time that `expected_step` gives it.
What the code cannot place is not ranked: nodes with engines alone or learners alone. Where each GPU does both in turn
(placement.colocate) there is nothing to split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_grpo.config.resources import gpus_per_node
from hpc_grpo.plan.expected import ExpectedStep, expected_step
from hpc_grpo.plan.fit import Plan, Settings, replanned

CARD_DEFAULT = (1, 3, 1)
"""Learners and engines a node, GPUs an engine: the layout where the config says nothing."""
CLOSE, EQUAL = 1.05, 1.01
"""A step longer by less than that is not worth another split, or another ZeRO stage of one: the shares are assumed."""
LAG = "rollout.max_policy_lag"
_KEYS = (
    "placement.learners_per_node",
    "engine.engines_per_node",
    "engine.tensor_parallel",
    "train.zero_stage",
    "train.offload_optimizer",
    LAG,
)


@dataclass(frozen=True)
class Split:
    """A planned placement that fits, with the time of its step."""

    plan: Plan
    step: ExpectedStep

    @property
    def layout(self) -> tuple[int, int, int]:
        """Learners a node, engines a node, GPUs an engine."""
        engine = self.plan.config.engine
        return self.plan.config.placement.learners_per_node, engine.engines_per_node, engine.tensor_parallel

    @property
    def zero(self) -> tuple[int, str]:
        """ZeRO stage and offload."""
        return self.plan.config.train.zero_stage, self.plan.config.train.offload_optimizer


def ranked_splits(plan: Plan) -> list[Split]:
    """Return the best split of each layout that fits the plan's nodes, fastest first; none on CPUs, without engines.

    All sample a step ahead, the shortest lag with which engines and learners work side by side, unless the plan's own
    lag is longer. Splits whose export may not fit the head node's memory come last.
    """
    layouts: dict[tuple[int, int, int], list[Split]] = {}
    for split in _splits(plan):
        layouts.setdefault(split.layout, []).append(split)
    return sorted((_plainest(plan, same_layout) for same_layout in layouts.values()), key=_order)


def fastest_in_turn(splits: Sequence[Split]) -> Split:
    """Return the best split where learners and engines take turns: no rollout is older than the weights it trains."""
    return min(splits, key=lambda split: (bool(split.plan.warnings), split.step.in_turn_s))


def recommended(plan: Plan, splits: Sequence[Split]) -> Split | None:
    """Return the fastest split; None where the plan fits, and none is so much faster that it were worth a change."""
    step, best = expected_step(plan), splits[0]
    return None if plan.fits and step and step.step_s < best.step.step_s * CLOSE else best


def changed_settings(plan: Plan, split: Split) -> Settings:
    """Return the keys in which a split differs from the plan, with its values."""
    ours, theirs = dict(_settings(plan)), dict(_settings(split.plan))
    return tuple((key, theirs[key]) for key in _KEYS if ours[key] != theirs[key])


def _splits(plan: Plan) -> Iterator[Split]:
    num_gpus = plan.config.launch.slurm.gpus_per_node or gpus_per_node(plan.config)
    if plan.config.placement.colocate:
        return
    lag = max(plan.config.rollout.max_policy_lag, plan.config.train.num_minibatches)
    for learners in range(1, num_gpus):
        for parallel in _parallelisms(plan, num_gpus - learners):
            engines = (num_gpus - learners) // parallel
            for stage in (1, 2, 3):
                for offload in ("none", "cpu"):
                    values = (learners, engines, parallel, stage, offload, lag)
                    candidate = replanned(plan, tuple(zip(_KEYS, values, strict=True)), plan.num_nodes)
                    if candidate.fits:
                        yield from _timed(candidate)


def _parallelisms(plan: Plan, num_gpus: int) -> list[int]:
    """Return the numbers of GPUs that an engine may have: powers of two that divide the heads and use all GPUs."""
    return [size for size in (1, 2, 4, 8) if num_gpus % size == 0 and plan.model.shape.num_heads % size == 0]


def _timed(plan: Plan) -> Iterator[Split]:
    step = expected_step(plan)
    if step is not None:
        yield Split(plan, step)


def _plainest(plan: Plan, splits: Sequence[Split]) -> Split:
    """Return the split of one layout that changes least of the plan, among those as good as the fastest."""
    safe = [split for split in splits if not split.plan.warnings] or splits
    enough_s = min(split.step.in_turn_s for split in safe) * EQUAL
    equals = [split for split in safe if split.step.in_turn_s <= enough_s]
    return min(equals, key=lambda split: (len(changed_settings(plan, split)), split.step.in_turn_s))


def _order(split: Split) -> tuple[bool, float, int, float]:
    """Sort by safety, then time; of equals, which hide behind the same training, by simplicity of the engines."""
    _, _, parallel = split.layout
    return bool(split.plan.warnings), split.step.ahead_s, parallel, split.step.in_turn_s


def _settings(plan: Plan) -> Settings:
    config = plan.config
    found = []
    for path in _KEYS:
        section, key = path.split(".")
        found.append((path, getattr(getattr(config, section), key)))
    return tuple(found)
