"""Memory of each device at the peak of a step: one learner's GPU, one engine's GPU, a node's host and shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from hpc_grpo.config import Config, resources
from hpc_grpo.config.resources import REDUCE_BUCKET_ELEMENTS, budget_of, engines_per_node, expects_gpus, kv_cache_gib
from hpc_grpo.plan import memory
from hpc_grpo.plan.memory import STATES, Hardware, MemoryBudget, Part, activations, nonzero, pinned_rounding_bytes
from hpc_grpo.plan.model import Model, ModelShape
from hpc_grpo.types import DTYPE_BYTES, GIB

SUB_GROUP_ELEMENTS = 1_000_000_000
"""DeepSpeed's `sub_group_size`: the number of parameters in one part of ZeRO-3's optimizer step."""
MAX_LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's `stage3_max_live_parameters`: the most parameters that ZeRO-3 gathers at once."""
LEARNER_CONTEXT_BYTES = 2 * GIB
"""CUDA context, NCCL's buffers and cuBLAS workspaces (assumed)."""
FRAGMENTATION = 0.05
"""Memory that torch's allocator reserves and does not use, as a share of the used memory (assumed)."""

BLOCK_TOKENS = 16
SAMPLING_ARRAYS = 4
"""float32 arrays [max_num_seqs, V] of the sampler: logits, sorted logits, probabilities, logprobs (assumed)."""
ENGINE_CONTEXT_BYTES, CUDA_GRAPH_BYTES = 1 * GIB, 1 * GIB
"""An engine's CUDA context, and its CUDA graphs (assumed)."""
_RUNTIME = ("CUDA context", "CUDA context and graphs")

GPU_PROCESS_GIB, CPU_PROCESS_GIB, GRADING_PROCESS_GIB, SYSTEM_GIB = 5.0, 1.5, 0.25, 4.0
"""Assumed: a learner or engine's libraries and buffers; a process of rewards or environments; the system."""
SHARED_MEMORY_SHARE = 0.5
"""Share of a node's memory that /dev/shm has by default (tmpfs(5), option `size`)."""


def is_checkpointed(config: Config, *, on_gpu: bool) -> bool:
    """Return whether gradient checkpointing is on. If the config does not say: only on GPUs."""
    chosen = config.train.gradient_checkpointing
    return on_gpu if chosen is None else chosen


def learner_budget(model: Model, config: Config, num_learners: int, hardware: Hardware) -> MemoryBudget:
    """Return the memory budget of one learner's GPU at the peak of a step."""
    states, working = state_parts(model, config, num_learners), activation_parts(model, config, on_gpu=True)
    parts = [*states, *working, communication_part(model, config), replayed_part(model, config, num_learners)]
    # The optimizer step's memory beyond the room left by activations, which are freed by then. Stages 1 and 2 take the
    # norm of the largest gradient in float64; stage 3 copies a sub-group's gradients.
    trained, letter = policy_parameters(model, config)
    needed, formula = 8 * min(model.shape.largest_parameter, trained), "8 V d"
    if config.train.zero_stage == 3:
        needed, formula = 4 * min(SUB_GROUP_ELEMENTS, trained // num_learners), f"4 min(10^9, {letter} / W)"
    if config.train.offload_optimizer == "none":
        beyond = max(0, needed - sum(part.num_bytes for part in working))
        parts.append(Part("optimizer step, beyond activations", beyond, f"{formula} - activations"))
    tensors = sum(part.num_bytes for part in parts)
    parts.append(Part("allocator's slack", int(tensors * FRAGMENTATION), f"{FRAGMENTATION:.0%} of the above, assumed"))
    parts.append(Part("CUDA context, NCCL", LEARNER_CONTEXT_BYTES, "assumed"))
    return MemoryBudget(memory.LEARNER_GPU, nonzero(*parts), hardware.gpu_bytes)


def replayed_bytes(model: Model, config: Config) -> int:
    """Return the bytes of a token's experts that engines send to learners; 0 without `train.router_replay`."""
    return model.shape.routed_bytes if config.train.router_replay else 0


def replayed_part(model: Model, config: Config, num_learners: int, on_node: int = 1) -> Part:
    """Return the experts of a step's longest sequences that `on_node` learners hold, each for its group's sequences."""
    num_tokens = config.rollout.prompts_per_step * config.rollout.group_size * config.max_model_len
    num_bytes = on_node * replayed_bytes(model, config) * num_tokens * config.train.sequence_parallel // num_learners
    return Part("experts of a step's tokens", num_bytes, "L e a token / W" + f" x {on_node}" * (on_node > 1))


def policy_parameters(model: Model, config: Config) -> tuple[int, str]:
    """Return how many parameters of the policy are trained, and their symbol: the model's, or those of its adapter."""
    if config.lora is None:
        return model.num_parameters, "P"
    return model.shape.adapter_parameters(config.lora.rank, config.lora.targets), "A"


def published_parameters(model: Model, config: Config) -> int:
    return policy_parameters(model, config)[0] if config.publishes_adapter else model.num_parameters


def state_parts(model: Model, config: Config, num_learners: int) -> list[Part]:
    """List weights, gradients, optimizer and reference, on the device where the learner computes."""
    states = STATES[config.model.dtype, config.train.zero_stage, config.train.offload_optimizer != "none"]
    p, dtype = model.num_parameters, config.model.dtype

    def part(name: str, whole: int, shard: int, parameters: int = p, letter: str = "P") -> Part:
        terms = [f"{whole} {letter}"] * bool(whole) + [f"{shard} {letter} / W"] * bool(shard)
        return Part(name, whole * parameters + shard * parameters // num_learners, " + ".join(terms) or "0")

    def frozen(name: str, size: int, parameters: int) -> Part:
        """Return the part of a model that is not trained: complete on each learner, or sharded by ZeRO-3."""
        return part(name, *((0, size) if config.train.zero_stage == 3 else (size, 0)), parameters)

    def trained(of: str, parameters: int, letter: str) -> list[Part]:
        rows = (
            ("weights", dtype, states.weights_whole, states.weights_shard),
            ("gradients", "summed in float32", states.gradients_whole, states.gradients_shard),
            ("optimizer", "float32 weights, moments", 0, states.optimizer_shard),
        )
        return [part(f"{of}{name} ({form})", whole, shard, parameters, letter) for name, form, whole, shard in rows]

    parts = [] if config.lora is None else [frozen(f"frozen weights ({dtype})", DTYPE_BYTES[dtype], p)]
    parts += trained("" if config.lora is None else "adapter: ", *policy_parameters(model, config))
    if config.needs.critic:
        parts += trained("critic: ", p, "P")
    if config.needs.reference and not config.reference_is_base:
        parts.append(frozen("reference model", DTYPE_BYTES[dtype], model.reference_parameters or p))
        if config.loss.kl.averages and dtype != "float32":
            parts.append(frozen("reference's average (float32)", 4, p))
    if config.needs.teacher:
        parts.append(frozen("teacher", DTYPE_BYTES[dtype], model.teacher_parameters))
    return parts


def activation_parts(model: Model, config: Config, *, on_gpu: bool) -> list[Part]:
    """List the activations of the fullest microbatch: those kept for the backward pass, and those used during it."""
    train, b, saves = config.train, DTYPE_BYTES[config.model.dtype], is_checkpointed(config, on_gpu=on_gpu)
    tokens, degree = ceil(train.max_tokens_per_microbatch / train.sequence_parallel), train.sequence_parallel
    peak = activations(model.shape, b, tokens, resources.LOGPROB_CHUNK_TOKENS, is_checkpointed=saves)
    # On a GPU, a masked kernel needs as many key heads as query heads, so unshared keys are repeated too.
    copies = resources.KEYS_OF_A_TOKEN if on_gpu else resources.KEYS_OF_A_TOKEN - 1
    size = model.shape.attention_size if on_gpu else model.shape.kv_size
    repeated = tokens * b * 2 * copies * size * (1 if saves else model.shape.num_layers)
    shared = repeated + degree * tokens * b * config.max_model_len if budget_of(config).shares_prompts else 0
    exchanged = 4 * b * (model.shape.attention_size + model.shape.kv_size) * tokens if degree > 1 else 0
    larger = "one layer" if peak.one_layer > peak.head else "one chunk of logits"
    return [
        Part("activations kept", peak.kept, peak.kept_formula),
        Part(f"working set: {larger}", peak.working, "max(one layer, 20 c V + 2 b V d)"),
        *nonzero(Part("keys of shared prompts, masks", shared, f"{2 * copies} b {'a' if on_gpu else 'k'} L T + b S T")),
        *nonzero(Part("heads sent to other learners, and got", exchanged, "4 b (a + k) T")),
    ]


def communication_part(model: Model, config: Config) -> Part:
    """Return DeepSpeed's buffers in a backward pass.

    Stages 1 and 2: two buckets (`overlap_comm`), and the float32 copy of the bucket that is being reduced. Under stage
    2 a bucket takes the largest gradient. Stage 3: one float32 bucket, its copy, and the gathered weights. Stage 1 in
    bfloat16 without offload reduces in place.
    """
    stage, b = config.train.zero_stage, DTYPE_BYTES[config.model.dtype]
    bucket, p, trained = REDUCE_BUCKET_ELEMENTS, model.num_parameters, policy_parameters(model, config)[0]
    if stage == 2:
        bucket = max(bucket, min(model.shape.largest_parameter, trained))
    if stage == 1 and b == 2 and config.train.offload_optimizer == "none":
        return Part("communication buffers", 0, "0")
    if stage == 3:
        total = 4 * bucket + 4 * min(bucket, trained) + b * min(MAX_LIVE_ELEMENTS, p)
        return Part("communication, gathered weights", total, "4 B + 4 min(B, P) + b min(10^9, P)")
    if stage == 2 and b == 2:
        return Part("communication buffers", 2 * b * bucket + 4 * min(bucket, trained), "2 b B + 4 min(B, P)")
    return Part("communication buffers", 8 * bucket, "8 B")


def host_parts(model: Model, config: Config, num_learners: int, learners_on_node: int) -> list[Part]:
    """List the host memory of the optimizers of a node's learners; an empty list without offload."""
    is_offloaded, n = config.train.offload_optimizer != "none", learners_on_node
    states = STATES[config.model.dtype, config.train.zero_stage, is_offloaded]
    p = policy_parameters(model, config)[0] + model.num_parameters * config.needs.critic
    pinned = [size * (p // num_learners) for size in states.host_pinned_shard]
    if is_offloaded and config.train.zero_stage == 3:
        full, rest = divmod(p // num_learners, SUB_GROUP_ELEMENTS)
        pinned += [4 * SUB_GROUP_ELEMENTS] * full + [4 * rest]
    times = "" if n == 1 else f" x {n}"
    rows = [
        ("optimizer (float32 weights, moments)", states.host_optimizer_shard),
        ("gradients (float32)", states.host_gradients_shard),
        ("copies on their way to the GPU", states.host_staging_shard),
    ]
    parts = [Part(name, n * size * p // num_learners, f"{size} P / W{times}") for name, size in rows]
    rounding = Part("rounding of page-locked arrays", n * pinned_rounding_bytes(pinned), "to powers of two")
    return list(nonzero(*parts, rounding))


@dataclass(frozen=True)
class KvCache:
    """The KV cache of one engine. `num_bytes` and `bytes_per_token` are per GPU; tokens and sequences per engine.

    `num_sequences` counts sequences of full length (max_model_len). More sequences fit if they are shorter.
    """

    num_bytes: int
    bytes_per_token: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return max(0, self.num_bytes // (self.bytes_per_token * BLOCK_TOKENS)) * BLOCK_TOKENS

    @property
    def num_sequences(self) -> int:
        return self.num_sequences_of(self.max_model_len)

    def num_sequences_of(self, tokens: float) -> int:
        """Return how many sequences of `tokens` tokens the cache holds."""
        return self.num_tokens // (ceil(tokens / BLOCK_TOKENS) * BLOCK_TOKENS)


def kv_bytes_per_token(shape: ModelShape, dtype_bytes: int, tensor_parallel: int = 1) -> int:
    """Return the bytes of a key and a value in every layer, 2 L k b. Tensor parallelism divides k, down to one head.

    >>> from hpc_grpo.plan.model import FAMILY
    >>> kv_bytes_per_token(FAMILY["7B"], 2)
    57344
    """
    heads = max(1, shape.num_kv_heads // tensor_parallel)
    return 2 * shape.num_layers * heads * shape.head_dim * dtype_bytes


def kv_cache(model: Model, config: Config, num_bytes: int) -> KvCache:
    per_token = kv_bytes_per_token(model.shape, DTYPE_BYTES[config.engine_dtype], config.engine.tensor_parallel)
    return KvCache(num_bytes, per_token, config.max_model_len)


def engine_budget(model: Model, config: Config, hardware: Hardware) -> tuple[MemoryBudget, KvCache]:
    """Return the budget of one engine's GPU, and its KV cache.

    The cache holds at least one sequence of full length, even if the sequence does not fit.

    vLLM (Kwon et al. 2023, arXiv:2309.06180) takes `gpu_memory_utilization` of the GPU. vLLM runs the largest batch
    once to measure the model's memory, and gives the rest to the KV cache in blocks.
    """
    engine, given_gib = config.engine, kv_cache_gib(config, on_gpu=True)
    runtime = Part(_RUNTIME[1], ENGINE_CONTEXT_BYTES + CUDA_GRAPH_BYTES, "assumed")
    if engine.vllm.get("enforce_eager"):
        runtime = Part(_RUNTIME[0], ENGINE_CONTEXT_BYTES, "assumed")
    parts = [*model_parts(model, config), runtime]
    limit = int(hardware.gpu_bytes * (1.0 if given_gib else engine.gpu_memory_utilization))
    needed = kv_cache(model, config, 0).bytes_per_token * (config.max_model_len + BLOCK_TOKENS)
    left = limit - sum(part.num_bytes for part in parts)
    if given_gib:
        kv_bytes, formula = int(given_gib * GIB), "engine.kv_cache_gib"
    elif left >= needed:
        kv_bytes, formula = left, f"the rest of {engine.gpu_memory_utilization:g} of the GPU"
    else:
        kv_bytes, formula = needed, "2 L k b (max_model_len + 16)"
    budget = MemoryBudget(memory.ENGINE_GPU, nonzero(*parts, Part("KV cache", kv_bytes, formula)), limit)
    return budget, kv_cache(model, config, kv_bytes)


def model_parts(model: Model, config: Config) -> list[Part]:
    """List weights and the largest forward pass, on one GPU of the engine."""
    b, parallel, shape = DTYPE_BYTES[config.engine_dtype], config.engine.tensor_parallel, model.shape
    max_num_seqs = config.engine.max_num_seqs
    tokens = min(resources.max_batched_tokens(config, on_gpu=expects_gpus(config)), max_num_seqs * config.max_model_len)
    forward = tokens * b * (4 * shape.hidden_size + 3 * shape.active_size // parallel)
    sampling = SAMPLING_ARRAYS * 4 * max_num_seqs * shape.vocab_size
    slots = 2 * b * policy_parameters(model, config)[0] // parallel if config.publishes_adapter else 0
    return [
        Part(f"weights ({config.engine_dtype})", b * model.num_parameters // parallel, "b P / tensor_parallel"),
        *nonzero(Part("slots of adapters", slots, "2 b A / tensor_parallel")),
        Part("largest batch, sampling", forward + sampling, "b (4 d + 3 f / tensor_parallel) N + 16 S V"),
    ]


def shared_gpu_budget(learner: MemoryBudget, states: Sequence[Part], engine: MemoryBudget) -> MemoryBudget:
    """Return the budget of a GPU shared by learner and engine in turns (placement.colocate), in the fuller phase.

    While the engine samples, the learner's `states` and its context stay. While the learner trains, only the engine's
    context and CUDA graphs stay: vLLM's sleep, level 2, frees weights and KV cache.
    """
    asleep = next(replace(part, name=f"engine asleep: {part.name}") for part in engine.parts if part.name in _RUNTIME)
    context = Part("learner: CUDA context, NCCL", LEARNER_CONTEXT_BYTES, "assumed")
    waiting = [replace(part, name=f"learner: {part.name}") for part in states]
    sampling = [*waiting, context, *(replace(part, name=f"engine: {part.name}") for part in engine.parts)]
    fuller = max(([*learner.parts, asleep], sampling), key=lambda parts: sum(part.num_bytes for part in parts))
    return MemoryBudget(memory.SHARED_GPU, nonzero(*fuller), learner.capacity_bytes)


def host_budget(model: Model, config: Config, num_learners: int, kv_bytes: int, hardware: Hardware) -> MemoryBudget:
    """Return the budget of a node's host memory at the peak of a step.

    On CPU, learners and engines are in host memory, without communication buffers: untouched pages use no memory.
    """
    learners, engines = config.placement.learners_per_node, engines_per_node(config)
    parts = [*shared_memory_parts(model, config), *host_parts(model, config, num_learners, learners)]
    parallel, each = config.engine.tensor_parallel, GPU_PROCESS_GIB
    if not expects_gpus(config):
        learner = [*state_parts(model, config, num_learners), *activation_parts(model, config, on_gpu=False)]
        weights = engines * sum(part.num_bytes for part in model_parts(model, config)) * parallel
        parts += [Part(f"learner: {part.name}", learners * part.num_bytes, part.formula) for part in learner]
        parts.append(Part("engines: weights, largest batch", weights, "b P + ..."))
        parts.append(Part("engines: KV cache", engines * parallel * kv_bytes, "engine.kv_cache_gib"))
        each = CPU_PROCESS_GIB
    else:
        stored = engines * kv_cache(model, config, kv_bytes).num_tokens * replayed_bytes(model, config)
        parts.append(Part("engines: experts of cached tokens", stored, "L e a token"))
    parts.append(replayed_part(model, config, num_learners, learners))
    workers = learners + engines * parallel
    hosts = engines * sum(environment.num_workers for _, environment in config.environments.values())
    grading = GRADING_PROCESS_GIB * (config.grading.num_workers + hosts) if engines else 0.0
    formula = f"{workers} x {each:g} + {grading:g} + {SYSTEM_GIB:g} GiB, assumed"
    parts.append(Part("processes", int((workers * each + grading + SYSTEM_GIB) * GIB), formula))
    return MemoryBudget(memory.HOST_MEMORY, nonzero(*parts), hardware.host_bytes)


def shared_memory_budget(model: Model, config: Config, hardware: Hardware) -> MemoryBudget:
    """Return the budget of /dev/shm, which is part of host memory. By default its size is half of a node's memory."""
    capacity = int(hardware.host_bytes * SHARED_MEMORY_SHARE)
    return MemoryBudget(memory.SHARED_MEMORY, shared_memory_parts(model, config), capacity)


def shared_memory_parts(model: Model, config: Config) -> tuple[Part, ...]:
    """List the weight store (weights/store.py; none without engines) and Ray's object store."""
    store = resources.weight_store_bytes(config, published_parameters(model, config))
    objects = int(config.launch.object_store_gib * GIB)
    return nonzero(
        Part("weight store in /dev/shm", store, "b A" if config.publishes_adapter else "b P"),
        Part("Ray's object store in /dev/shm", objects, "launch.object_store_gib"),
    )
