"""Rank placements: how many of a node's GPUs learn and how many sample, with which ZeRO stage and offload.

Plans every split, and simulates those that fit. Omits nodes with only engines or only learners, which cannot be placed.
With placement.colocate each GPU does both in turns, so there is nothing to split.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from hpc_grpo.config.resources import gpus_per_node
from hpc_grpo.plan.fit import Plan, Settings, replanned
from hpc_grpo.simulate.assumed import longest_step, simulated
from hpc_grpo.simulate.cluster import Forecast

CARD_DEFAULT = (1, 3, 1)
"""Default layout: learners per node, engines per node, GPUs per engine."""
CLOSE, _EQUAL = 1.05, 1.01
"""Another split must be faster by `CLOSE`, another ZeRO stage by `_EQUAL`, because the rates are assumed."""
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
    """A plan that fits, with forecasts at lag 0 (`in_turn`) and at its own lag."""

    plan: Plan
    in_turn: Forecast
    ahead: Forecast


def layout(plan: Plan) -> tuple[int, int, int]:
    """Return learners per node, engines per node, GPUs per engine."""
    engine = plan.config.engine
    return plan.config.placement.learners_per_node, engine.engines_per_node, engine.tensor_parallel


def ranked_splits(plan: Plan) -> list[Split]:
    """Return the best split of each layout that fits the plan's nodes, fastest first; [] if no time is known.

    All splits sample one step ahead, the shortest lag with which engines and learners work at the same time, or use the
    plan's lag if it is longer. Splits whose export may not fit the head node's memory come last. Among equally fast
    splits, those with the simplest engines come first.
    """
    found = [
        Split(best, in_turn, ahead)
        for _, same_layout in itertools.groupby(_candidates(plan), layout)
        for best in [_plainest(plan, list(same_layout))]
        if (in_turn := simulated(best, 0)) and (ahead := simulated(best, best.config.rollout.max_policy_lag))
    ]
    return sorted(
        found,
        key=lambda split: (
            bool(split.plan.warnings),
            round(math.log(split.ahead.step_s, _EQUAL)),
            layout(split.plan)[2],
            split.in_turn.step_s,
        ),
    )


def fastest_in_turn(splits: Sequence[Split]) -> Split:
    """Return the fastest split without a lag: learners and engines take turns."""
    return min(splits, key=lambda split: (bool(split.plan.warnings), split.in_turn.step_s))


def changed_settings(plan: Plan, other: Plan) -> Settings:
    """Return the keys of a placement that another plan changes, with the other's values."""
    values = ((key, attrgetter(key)(other.config)) for key in _KEYS)
    return tuple((key, value) for key, value in values if value != attrgetter(key)(plan.config))


def _candidates(plan: Plan) -> Iterator[Plan]:
    """Yield plans of every layout, ZeRO stage and offload that fit, and whose time is known; ordered by layout."""
    num_gpus = plan.config.launch.slurm.gpus_per_node or gpus_per_node(plan.config)
    lag = max(plan.config.rollout.max_policy_lag, plan.config.train.num_minibatches)
    for learners in range(1, 1 if plan.config.placement.colocate else num_gpus):
        for parallel in (1, 2, 4, 8):
            if (num_gpus - learners) % parallel or plan.model.shape.num_heads % parallel:
                continue  # it leaves GPUs unused, or does not divide the heads
            engines = (num_gpus - learners) // parallel
            for zero in itertools.product((1, 2, 3), ("none", "cpu")):
                values = (learners, engines, parallel, *zero, lag)
                candidate = replanned(plan, tuple(zip(_KEYS, values, strict=True)), plan.num_nodes)
                if candidate.fits and longest_step(candidate):
                    yield candidate


def _plainest(plan: Plan, same_layout: Sequence[Plan]) -> Plan:
    """Return the near-fastest candidate of one layout that changes the fewest keys of the plan.

    The candidates differ only in the learners' part: compares their longest steps without overlap.
    """
    safe = [each for each in same_layout if not each.warnings] or same_layout
    in_turn_s = [sum(longest_step(each) or ()) for each in safe]
    equals = [(s, each) for s, each in zip(in_turn_s, safe, strict=True) if s <= min(in_turn_s) * _EQUAL]
    return min(equals, key=lambda found: (len(changed_settings(plan, found[1])), found[0]))[1]
