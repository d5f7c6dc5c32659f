"""Add up one learner's GPU, and what its offloaded optimizer takes of host memory."""

from __future__ import annotations

from dataclasses import replace

from hpc_grpo.config import Config
from hpc_grpo.config.resources import KEYS_OF_A_TOKEN, LOGPROB_CHUNK_TOKENS, budget_of
from hpc_grpo.plan.memory import (
    LEARNER_GPU,
    STATES,
    Hardware,
    MemoryBudget,
    Part,
    StateBytes,
    activations,
    nonzero,
    pinned_rounding_bytes,
)
from hpc_grpo.plan.model import Model
from hpc_grpo.types import DTYPE_BYTES, GIB

REDUCE_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's `reduce_bucket_size`: allocated in full, however small the model is."""
SUB_GROUP_ELEMENTS = 1_000_000_000
"""DeepSpeed's `sub_group_size`: ZeRO-3 takes the optimizer's step for so many parameters at once."""
MAX_LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's `stage3_max_live_parameters`: gathered at once under ZeRO-3."""
CONTEXT_BYTES = 2 * GIB
"""CUDA context, NCCL's buffers and cuBLAS workspaces (assumed)."""
FRAGMENTATION = 0.05
"""Share by which torch's allocator reserves more than it hands out (assumed)."""


def is_checkpointed(config: Config, *, on_gpu: bool) -> bool:
    """Say whether gradient checkpointing is on: where the config leaves it open, on GPUs alone."""
    chosen = config.train.gradient_checkpointing
    return on_gpu if chosen is None else chosen


def learner_budget(model: Model, config: Config, num_learners: int, hardware: Hardware) -> MemoryBudget:
    """Return one learner's GPU at the peak of a step."""
    states, working = state_parts(model, config, num_learners), activation_parts(model, config, on_gpu=True)
    buffers = communication_part(model, config)
    parts = [*states, *working, buffers, _step_part(model, config, num_learners, working)]
    tensors = sum(part.num_bytes for part in parts)
    parts.append(Part("allocator's slack", int(tensors * FRAGMENTATION), f"{FRAGMENTATION:.0%} of the above, assumed"))
    parts.append(Part("CUDA context, NCCL", CONTEXT_BYTES, "assumed"))
    return MemoryBudget(LEARNER_GPU, nonzero(*parts), hardware.gpu_bytes)


def state_parts(model: Model, config: Config, num_learners: int) -> list[Part]:
    """List weights, gradients, optimizer and reference, where the learner computes."""
    states, p = _states(config), model.num_parameters
    dtype = config.model.dtype
    parts = [
        _state_part(f"weights ({dtype})", states.weights_whole, states.weights_shard, p, num_learners),
        _state_part("gradients (summed in float32)", states.gradients_whole, states.gradients_shard, p, num_learners),
        _state_part("optimizer (float32 weights, moments)", 0, states.optimizer_shard, p, num_learners),
    ]
    if config.needs.critic:
        parts += [replace(part, name=f"critic: {part.name}") for part in parts]
    if config.needs.reference:
        own = model.reference_parameters or p
        parts.append(_frozen_part("reference model", DTYPE_BYTES[dtype], config, own, num_learners))
        if config.loss.kl.averages and dtype != "float32":
            parts.append(_frozen_part("reference's average (float32)", 4, config, p, num_learners))
    if config.needs.teacher:
        teachers = model.teacher_parameters
        parts.append(_frozen_part("teacher", DTYPE_BYTES[dtype], config, teachers, num_learners))
    return parts


def activation_parts(model: Model, config: Config, *, on_gpu: bool) -> list[Part]:
    """List what the fullest microbatch keeps for its backward pass, and works with in it."""
    peak = activations(
        model.shape,
        DTYPE_BYTES[config.model.dtype],
        config.train.max_tokens_per_microbatch,
        LOGPROB_CHUNK_TOKENS,
        is_checkpointed=is_checkpointed(config, on_gpu=on_gpu),
    )
    one_layer = config.train.max_tokens_per_microbatch * DTYPE_BYTES[config.model.dtype]
    num_layers = 1 if is_checkpointed(config, on_gpu=on_gpu) else model.shape.num_layers
    # On a GPU a kernel with a mask takes as many heads of keys as of queries: own ones are repeated, too.
    copies, size = (
        (KEYS_OF_A_TOKEN, model.shape.attention_size) if on_gpu else (KEYS_OF_A_TOKEN - 1, model.shape.kv_size)
    )
    repeated = one_layer * 2 * copies * size * num_layers
    masks = one_layer * config.max_model_len
    shared = repeated + masks if budget_of(config).shares_prompts else 0
    larger = "one layer" if peak.one_layer > peak.head else "one chunk of logits"
    return [
        Part("activations kept", peak.kept, peak.kept_formula),
        Part(f"working set: {larger}", peak.working, "max(one layer, 20 c V + 2 b V d)"),
        *nonzero(Part("keys of shared prompts, masks", shared, f"{2 * copies} b {'a' if on_gpu else 'k'} L T + b S T")),
    ]


def communication_part(model: Model, config: Config) -> Part:
    """Return DeepSpeed's buffers in a backward pass.

    Stages 1 and 2: two buckets (`overlap_comm`), and the one being reduced in float32. Stage 3: one float32
    bucket, its copy, and the gathered weights. bfloat16 stage 1 reduces its gradients where they are.
    """
    stage, b = config.train.zero_stage, DTYPE_BYTES[config.model.dtype]
    bucket, p = REDUCE_BUCKET_ELEMENTS, model.num_parameters
    if stage == 1 and b == 2 and config.train.offload_optimizer == "none":
        return Part("communication buffers", 0, "0")
    if stage == 3:
        total = 4 * bucket + 4 * min(bucket, p) + b * min(MAX_LIVE_ELEMENTS, p)
        return Part("communication, gathered weights", total, "4 B + 4 min(B, P) + b min(10^9, P)")
    if stage == 2 and b == 2:
        total = 2 * b * bucket + 4 * max(min(bucket, p), model.shape.largest_parameter)
        return Part("communication buffers", total, "2 b B + 4 max(min(B, P), V d)")
    return Part("communication buffers", 8 * bucket, "8 B")


def host_parts(model: Model, config: Config, num_learners: int, learners_on_node: int) -> list[Part]:
    """List what the optimizer of a node's learners takes of host memory: nothing without offload."""
    states = _states(config)
    p, n = model.num_parameters * (2 if config.needs.critic else 1), learners_on_node
    rounding = n * pinned_rounding_bytes(_pinned_arrays(states, config, p // num_learners))
    times = "" if n == 1 else f" x {n}"
    rows = [
        ("optimizer (float32 weights, moments)", states.host_optimizer_shard),
        ("gradients (float32)", states.host_gradients_shard),
        ("copies on their way to the GPU", states.host_staging_shard),
    ]
    parts = [Part(name, n * size * p // num_learners, f"{size} P / W{times}") for name, size in rows]
    return list(nonzero(*parts, Part("rounding of page-locked arrays", rounding, "to powers of two")))


def _states(config: Config) -> StateBytes:
    return STATES[config.model.dtype, config.train.zero_stage, config.train.offload_optimizer != "none"]


def _pinned_arrays(states: StateBytes, config: Config, shard: int) -> list[int]:
    arrays = [size * shard for size in states.host_pinned_shard]
    if config.train.offload_optimizer != "none" and config.train.zero_stage == 3:
        full, rest = divmod(shard, SUB_GROUP_ELEMENTS)
        arrays += [4 * SUB_GROUP_ELEMENTS] * full + [4 * rest]
    return arrays


def _step_part(model: Model, config: Config, num_learners: int, working: list[Part]) -> Part:
    """Return what the optimizer's step needs beyond the room that activations, gone by then, have left.

    Stages 1 and 2 take the norm of the largest gradient in float64; stage 3 copies a sub-group's gradients.
    """
    if config.train.offload_optimizer != "none":
        return Part("optimizer step", 0, "0")
    if config.train.zero_stage == 3:
        needed, formula = 4 * min(SUB_GROUP_ELEMENTS, model.num_parameters // num_learners), "4 min(10^9, P / W)"
    else:
        needed, formula = 8 * model.shape.largest_parameter, "8 V d"
    beyond = max(0, needed - sum(part.num_bytes for part in working))
    return Part("optimizer step, beyond activations", beyond, f"{formula} - activations")


def _frozen_part(name: str, size: int, config: Config, num_parameters: int, num_learners: int) -> Part:
    """Count `size` bytes a parameter of a model that is not trained: whole on each learner, or sharded by ZeRO-3."""
    whole, shard = (0, size) if config.train.zero_stage == 3 else (size, 0)
    return _state_part(name, whole, shard, num_parameters, num_learners)


def _state_part(name: str, whole: int, shard: int, num_parameters: int, num_learners: int) -> Part:
    num_bytes = whole * num_parameters + shard * num_parameters // num_learners
    terms = [f"{whole} P"] * bool(whole) + [f"{shard} P / W"] * bool(shard)
    return Part(name, num_bytes, " + ".join(terms) or "0")
