"""Decide whether a run fits its planned nodes, and what to change if it does not: every suggestion was planned."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.config.resources import engines_per_node, expects_gpus, gpus_per_node, kv_cache_gib, weight_bytes
from hpc_grpo.launch.environment import job_environ
from hpc_grpo.plan.budgets import (
    KvCache,
    engine_budget,
    host_budget,
    kv_cache,
    learner_budget,
    policy_parameters,
    shared_gpu_budget,
    shared_memory_budget,
    state_parts,
)
from hpc_grpo.plan.memory import ENGINE_GPU, HOST_MEMORY, Hardware, MemoryBudget
from hpc_grpo.plan.model import FAMILY, Model, family_model, read_model
from hpc_grpo.types import GIB

_MAX_NODES = 256
_MAX_CHANGES = 3
_LEAST_OBJECT_STORE_GIB = 4.0

Settings = tuple[tuple[str, Any], ...]
"""Keys with values, such as (("train.zero_stage", 3),)."""


@dataclass(frozen=True)
class Plan:
    """A run on a number of nodes, with the budget of every kind of device. `kv_cache` is None without engines (SFT)."""

    model: Model
    config: Config
    num_nodes: int
    hardware: Hardware
    budgets: tuple[MemoryBudget, ...]
    kv_cache: KvCache | None

    @property
    def num_learners(self) -> int:
        return self.num_nodes * self.config.placement.learners_per_node

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        found = [
            f"{budget.device}: {budget.num_bytes / GIB:.1f} GiB needed, {budget.capacity_bytes / GIB:.1f} GiB there"
            for budget in self.budgets
            if not budget.fits
        ]
        needed, asked = gpus_per_node(self.config), self.config.launch.slurm.gpus_per_node
        if asked and needed > asked:
            found.append(f"GPUs: {needed} needed on each node, launch.slurm.gpus_per_node = {asked}")
        degree, shape = self.config.train.sequence_parallel, self.model.shape
        shared = {"learners": self.num_learners, "heads": shape.num_heads, "key heads": shape.num_kv_heads}
        if uneven := [f"{count} {name}" for name, count in shared.items() if count % degree]:
            found.append(f"train.sequence_parallel = {degree} does not divide {', '.join(uneven)}")
        if self.kv_cache is not None and self.kv_cache.num_sequences == 0:
            fix = "raise engine.kv_cache_gib" + (" or set it to null" if self.config.engine.kv_cache_gib else "")
            length = f"{self.kv_cache.num_tokens:,} tokens, less than one sequence of {self.kv_cache.max_model_len:,}"
            found.append(f"KV cache: {length}; {fix}")
        return tuple(found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings about short peaks that may not fit although training fits."""
        host = next(budget for budget in self.budgets if budget.device == HOST_MEMORY)
        export = weight_bytes(self.config, policy_parameters(self.model, self.config)[0])
        if not host.fits or host.num_bytes + export <= host.capacity_bytes:
            return ()
        return (
            f"The export collects the weights once more on the head node: {(host.num_bytes + export) / GIB:.1f} of "
            f"{host.capacity_bytes / GIB:.1f} GiB for a moment, so the job may be killed there. Free host memory: "
            f"more nodes, or a smaller launch.object_store_gib.",
        )


def plan_of(
    config: Config, environ: Mapping[str, str], hardware: Hardware, *, nodes: int | None = None, size: str | None = None
) -> Plan:
    """Return the plan of `config`. Defaults: `nodes` of the config, and the model of model.path instead of a `size`.

    `environ` is the job's start environment: it says where to find the model. Raises ConfigError if the model is not on
    this machine, or cannot be planned.
    """
    environ = job_environ(environ, config.launch.env)
    model = read_model(config.model.path, environ) if size is None else family_model(size)
    frozen = {key: read_model(path, environ, key).num_parameters for key, path in config.scoring_models.items()}
    teacher, reference = frozen.get("task.args.teacher", 0), frozen.get("loss.kl.reference", 0)
    model = replace(model, teacher_parameters=teacher, reference_parameters=reference)
    return make_plan(model, config, nodes or config.launch.num_nodes, hardware)


def make_plan(model: Model, config: Config, num_nodes: int, hardware: Hardware) -> Plan:
    """Return the plan of `config` on `num_nodes`: the memory of each device, added up."""
    num_learners = num_nodes * config.placement.learners_per_node
    on_gpu, cache = expects_gpus(config), None
    gpus = [learner_budget(model, config, num_learners, hardware)] if on_gpu else []
    if engines_per_node(config) and on_gpu:
        engine, cache = engine_budget(model, config, hardware)
        gpus.append(engine)
        if config.placement.colocate:
            gpus = [shared_gpu_budget(gpus[0], state_parts(model, config, num_learners), engine)]
    elif engines_per_node(config):
        cache = kv_cache(model, config, int((kv_cache_gib(config, on_gpu=False) or 0) * GIB))
    host = host_budget(model, config, num_learners, cache.num_bytes if cache else 0, hardware)
    budgets = (*gpus, host, shared_memory_budget(model, config, hardware))
    return Plan(model, config, num_nodes, hardware, budgets, cache)


def replanned(plan: Plan, settings: Settings, num_nodes: int) -> Plan:
    """Return the plan with other values of dotted keys, and other nodes. Does not validate the values."""
    config = plan.config
    for path, value in settings:
        config = _replaced(config, path.split("."), value)
    return make_plan(plan.model, config, num_nodes, plan.hardware)


def _replaced(section: Any, keys: Sequence[str], value: Any) -> Any:
    first, *rest = keys
    return section.model_copy(update={first: _replaced(getattr(section, first), rest, value) if rest else value})


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
