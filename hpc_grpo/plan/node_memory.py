"""Add up a node's host memory, and shared memory (/dev/shm) as a part of it."""

from __future__ import annotations

from hpc_grpo.config import Config
from hpc_grpo.config.resources import engines_per_node, expects_gpus, weight_store_bytes
from hpc_grpo.plan.engine_memory import model_parts
from hpc_grpo.plan.learner_memory import activation_parts, host_parts, state_parts
from hpc_grpo.plan.memory import HOST_MEMORY, SHARED_MEMORY, Hardware, MemoryBudget, Part, nonzero
from hpc_grpo.plan.model import Model
from hpc_grpo.types import GIB

GPU_PROCESS_GIB = 5.0
CPU_PROCESS_GIB = 1.5
GRADING_PROCESS_GIB = 0.25
SYSTEM_GIB = 4.0
"""Assumed: libraries and staging buffers of a learner or engine; a reward process; driver, Ray, operating system."""
SHARED_MEMORY_SHARE = 0.5
"""A share of a node's memory: the kernel's default size of /dev/shm (tmpfs(5), option `size`)."""


def host_budget(model: Model, config: Config, num_learners: int, kv_bytes: int, hardware: Hardware) -> MemoryBudget:
    """Return a node's host memory at the peak of a step."""
    shared = shared_memory_parts(model, config)
    offloaded = host_parts(model, config, num_learners, config.placement.learners_per_node)
    on_cpu = [] if expects_gpus(config) else _cpu_parts(model, config, num_learners, kv_bytes)
    parts = [*shared, *offloaded, *on_cpu, _processes(config)]
    return MemoryBudget(HOST_MEMORY, nonzero(*parts), hardware.host_bytes)


def shared_memory_budget(model: Model, config: Config, hardware: Hardware) -> MemoryBudget:
    """Return the part of it in /dev/shm, whose size is half of a node's memory unless the site changed it."""
    capacity = int(hardware.host_bytes * SHARED_MEMORY_SHARE)
    return MemoryBudget(SHARED_MEMORY, shared_memory_parts(model, config), capacity)


def shared_memory_parts(model: Model, config: Config) -> tuple[Part, ...]:
    """List the weight store (weights/store.py; none without engines) and Ray's object store."""
    store = weight_store_bytes(config, model.num_parameters)
    objects = int(config.launch.object_store_gib * GIB)
    return nonzero(
        Part("weight store in /dev/shm", store, "b P"),
        Part("Ray's object store in /dev/shm", objects, "launch.object_store_gib"),
    )


def _processes(config: Config) -> Part:
    engines = engines_per_node(config)
    workers = config.placement.learners_per_node + engines * config.engine.tensor_parallel
    each = GPU_PROCESS_GIB if expects_gpus(config) else CPU_PROCESS_GIB
    grading = GRADING_PROCESS_GIB * config.grading.num_workers if engines else 0.0
    formula = f"{workers} x {each:g} + {grading:g} + {SYSTEM_GIB:g} GiB, assumed"
    return Part("processes", int((workers * each + grading + SYSTEM_GIB) * GIB), formula)


def _cpu_parts(model: Model, config: Config, num_learners: int, kv_bytes: int) -> list[Part]:
    """List what learners and engines on CPU take, but for communication buffers: untouched pages take nothing."""
    learners, engines = config.placement.learners_per_node, engines_per_node(config)
    learner = [*state_parts(model, config, num_learners), *activation_parts(model, config, on_gpu=False)]
    weights = sum(part.num_bytes for part in model_parts(model, config)) * config.engine.tensor_parallel
    return [
        *(Part(f"learner: {part.name}", learners * part.num_bytes, part.formula) for part in learner),
        Part("engines: weights, largest batch", engines * weights, "b P + ..."),
        Part("engines: KV cache", engines * config.engine.tensor_parallel * kv_bytes, "engine.kv_cache_gib"),
    ]
