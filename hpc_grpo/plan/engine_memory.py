"""Add up each GPU of one vLLM engine, and count the sequences that its KV cache holds.

vLLM (Kwon et al. 2023, arXiv:2309.06180) takes `gpu_memory_utilization` of the GPU, runs the largest batch once to see
what the model needs, and gives the rest to the KV cache in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from hpc_grpo.config import Config
from hpc_grpo.config.resources import expects_gpus, kv_cache_gib, max_batched_tokens
from hpc_grpo.plan.learner_memory import CONTEXT_BYTES as LEARNER_CONTEXT_BYTES
from hpc_grpo.plan.memory import ENGINE_GPU, SHARED_GPU, Hardware, MemoryBudget, Part, nonzero
from hpc_grpo.plan.model import Model, ModelShape
from hpc_grpo.types import DTYPE_BYTES, GIB

BLOCK_TOKENS = 16
SAMPLING_ARRAYS = 4
"""float32 arrays [max_num_seqs, V] of the sampler: logits, sorted logits, probabilities, logprobs (assumed)."""
CONTEXT_BYTES = 1 * GIB
CUDA_GRAPH_BYTES = 1 * GIB
"""Assumed, as is the CUDA context."""
_RUNTIME = ("CUDA context", "CUDA context and graphs")


@dataclass(frozen=True)
class KvCache:
    """The KV cache of one engine. `num_bytes` and `bytes_per_token` are of one GPU; tokens and sequences of the engine.

    `num_sequences` counts full-length ones (max_model_len): shorter ones share the same tokens.
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
        """Return how many sequences of so many tokens it holds."""
        return self.num_tokens // (ceil(tokens / BLOCK_TOKENS) * BLOCK_TOKENS)


def kv_bytes_per_token(shape: ModelShape, dtype_bytes: int, tensor_parallel: int = 1) -> int:
    """Return 2 L k b: a key and a value of every layer; tensor parallelism divides the heads, down to one a GPU.

    >>> from hpc_grpo.plan.model import FAMILY
    >>> kv_bytes_per_token(FAMILY["7B"], 2)
    57344
    """
    heads = max(1, shape.num_kv_heads // tensor_parallel)
    return 2 * shape.num_layers * heads * shape.head_dim * dtype_bytes


def engine_budget(model: Model, config: Config, hardware: Hardware) -> tuple[MemoryBudget, KvCache]:
    """Return one GPU of one engine; its cache holds at least one sequence of full length, whether it fits or not."""
    engine, given_gib = config.engine, kv_cache_gib(config, on_gpu=True)
    runtime = Part(_RUNTIME[1], CONTEXT_BYTES + CUDA_GRAPH_BYTES, "assumed")
    if engine.vllm.get("enforce_eager"):
        runtime = Part(_RUNTIME[0], CONTEXT_BYTES, "assumed")
    parts = [*model_parts(model, config), runtime]
    per_token = kv_bytes_per_token(model.shape, DTYPE_BYTES[config.engine_dtype], engine.tensor_parallel)
    limit = int(hardware.gpu_bytes * (1.0 if given_gib else engine.gpu_memory_utilization))
    needed = per_token * (config.max_model_len + BLOCK_TOKENS)
    left = limit - sum(part.num_bytes for part in parts)
    if given_gib:
        kv_bytes, formula = int(given_gib * GIB), "engine.kv_cache_gib"
    elif left >= needed:
        kv_bytes, formula = left, f"the rest of {engine.gpu_memory_utilization:g} of the GPU"
    else:
        kv_bytes, formula = needed, "2 L k b (max_model_len + 16)"
    cache = KvCache(kv_bytes, per_token, config.max_model_len)
    return MemoryBudget(ENGINE_GPU, nonzero(*parts, Part("KV cache", kv_bytes, formula)), limit), cache


def shared_gpu_budget(learner: MemoryBudget, states: Sequence[Part], engine: MemoryBudget) -> MemoryBudget:
    """Return a GPU that learner and engine have in turn (placement.colocate), in the fuller of the two phases.

    While the engine samples, the learner's `states` and its context stay; while the learner trains, of the engine its
    own context and CUDA graphs alone: vLLM's sleep, level 2, gives back weights and KV cache.
    """
    asleep = next(replace(part, name=f"engine asleep: {part.name}") for part in engine.parts if part.name in _RUNTIME)
    context = Part("learner: CUDA context, NCCL", LEARNER_CONTEXT_BYTES, "assumed")
    waiting = [replace(part, name=f"learner: {part.name}") for part in states]
    sampling = [*waiting, context, *(replace(part, name=f"engine: {part.name}") for part in engine.parts)]
    training = [*learner.parts, asleep]
    fuller = max((training, sampling), key=lambda parts: sum(part.num_bytes for part in parts))
    return MemoryBudget(SHARED_GPU, nonzero(*fuller), learner.capacity_bytes)


def cpu_kv_cache(model: Model, config: Config) -> KvCache:
    num_bytes = int((kv_cache_gib(config, on_gpu=False) or 0) * GIB)
    per_token = kv_bytes_per_token(model.shape, DTYPE_BYTES[config.engine_dtype], config.engine.tensor_parallel)
    return KvCache(num_bytes, per_token, config.max_model_len)


def model_parts(model: Model, config: Config) -> list[Part]:
    """List weights and the largest forward pass, on one GPU of the engine."""
    b, parallel, shape = DTYPE_BYTES[config.engine_dtype], config.engine.tensor_parallel, model.shape
    max_num_seqs = config.engine.max_num_seqs
    tokens = min(max_batched_tokens(config, on_gpu=expects_gpus(config)), max_num_seqs * config.max_model_len)
    forward = tokens * b * (4 * shape.hidden_size + 3 * shape.intermediate_size // parallel)
    sampling = SAMPLING_ARRAYS * 4 * max_num_seqs * shape.vocab_size
    return [
        Part(f"weights ({config.engine_dtype})", b * model.num_parameters // parallel, "b P / tensor_parallel"),
        Part("largest batch, sampling", forward + sampling, "b (4 d + 3 f / tensor_parallel) N + 16 S V"),
    ]
