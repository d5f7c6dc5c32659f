"""Suggest changes if a run does not fit, and the largest model that fits with the same settings.

Nothing is guessed: every suggestion was planned, and fits.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

from hpc_grpo.plan.fit import Plan, Settings, make_plan, replanned
from hpc_grpo.plan.memory import ENGINE_GPU
from hpc_grpo.plan.model import FAMILY, family_model
from hpc_grpo.types import GIB

_MAX_NODES = 256
_MAX_CHANGES = 3
_LEAST_OBJECT_STORE_GIB = 4.0


@dataclass(frozen=True)
class Change:
    """Settings to change, as on the command line, and the number of nodes to take."""

    settings: Settings
    num_nodes: int

    @property
    def text(self) -> str:
        pairs = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in self.settings)
        return " ".join(f"{key}={value}" for key, value in pairs)


def changes_that_fit(plan: Plan) -> list[Change]:
    """Return the smallest sets of changes that fit: on the same nodes, then on the fewest further nodes."""
    found: list[Settings] = []
    for size in range(1, _MAX_CHANGES + 1):
        for group in itertools.combinations(_candidates(plan), size):
            settings = tuple(itertools.chain.from_iterable(group))
            is_minimal = not any(set(smaller) <= set(settings) for smaller in found)
            if is_minimal and replanned(plan, settings, plan.num_nodes).fits:
                found.append(settings)
    return [Change(settings, plan.num_nodes) for settings in found] + _more_nodes(plan)


def largest_models(plan: Plan) -> list[tuple[str, Plan]]:
    """Return each known size with its plan under the same settings, in ascending order."""
    return [(size, make_plan(family_model(size), plan.config, plan.num_nodes, plan.hardware)) for size in FAMILY]


def _candidates(plan: Plan) -> list[Settings]:
    """List changes worth trying, the cheapest first."""
    config = plan.config
    train, wider = config.train, _wider_engines(plan)
    has_large_store = config.launch.object_store_gib > _LEAST_OBJECT_STORE_GIB
    kl = config.loss.kl
    has_plain_reference = config.needs.reference and kl.refresh_steps is None and kl.reference is None
    holds_several = config.needs.rollouts and train.max_tokens_per_microbatch > config.max_model_len
    possible: list[tuple[bool, Settings]] = [
        (has_large_store, (("launch.object_store_gib", _LEAST_OBJECT_STORE_GIB),)),
        (train.gradient_checkpointing is False, (("train.gradient_checkpointing", True),)),
        (train.zero_stage < 3, (("train.zero_stage", 3),)),
        (holds_several, (("train.max_tokens_per_microbatch", config.max_model_len),)),
        (train.attention != "flash_attention_2", (("train.sequence_parallel", 2 * train.sequence_parallel),)),
        (train.offload_optimizer == "none", (("train.offload_optimizer", "cpu"),)),
        (bool(wider), wider),
        (has_plain_reference, (("loss.kl.coef", 0.0),)),
    ]
    return [settings for applies, settings in possible if applies]


def _more_nodes(plan: Plan) -> list[Change]:
    """Find the fewest nodes that fit: with the same settings, then sharding, offload, wider engines."""
    train = plan.config.train
    wider = _wider_engines(plan) if any(b.device == ENGINE_GPU and not b.fits for b in plan.budgets) else ()
    sharded = (("train.zero_stage", 3),) if train.zero_stage < 3 else ()
    offloaded = (("train.offload_optimizer", "cpu"),) if train.offload_optimizer == "none" else ()
    found: list[Change] = []
    ceiling = _MAX_NODES
    for settings in dict.fromkeys([(), sharded, offloaded, (*sharded, *offloaded)]):
        for num_nodes in range(plan.num_nodes + 1, ceiling + 1):
            if replanned(plan, (*wider, *settings), num_nodes).fits:
                found.append(Change((*wider, *settings), num_nodes))
                ceiling = num_nodes - 1
                break
    return found


def _wider_engines(plan: Plan) -> Settings:
    """Return settings with twice the GPUs for each engine and half as many engines; () if that is impossible."""
    engine = plan.config.engine
    wider = 2 * engine.tensor_parallel
    in_turn = plan.config.placement.colocate
    if in_turn or not plan.config.needs.rollouts or engine.engines_per_node < 2 or plan.model.shape.num_heads % wider:
        return ()
    return ("engine.tensor_parallel", wider), ("engine.engines_per_node", engine.engines_per_node // 2)


def shortfall(plan: Plan) -> str:
    """Name the device that lacks the most memory, else the other problems of the plan; "" if the plan fits."""
    missing = [budget for budget in plan.budgets if not budget.fits]
    if not missing:
        return "; ".join(plan.problems)
    worst = max(missing, key=lambda budget: budget.num_bytes / budget.capacity_bytes)
    return f"{worst.device} {worst.num_bytes / GIB:.0f} of {worst.capacity_bytes / GIB:.0f} GiB"
