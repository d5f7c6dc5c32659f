"""Count bytes: a device's memory as a sum of named parts, DeepSpeed's bytes per parameter, a microbatch's activations.

budgets.py applies these to the settings of a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpc_grpo.plan.model import ModelShape
from hpc_grpo.types import GIB

LEARNER_GPU, ENGINE_GPU, SHARED_GPU = "learner GPU", "engine GPU", "GPU of both in turn"
HOST_MEMORY, SHARED_MEMORY = "node's host memory", "node's shared memory"
"""Names of the devices with a memory budget, as printed."""


@dataclass(frozen=True)
class Part:
    """One line of a budget. `formula` is the formula of `num_bytes`, in the symbols of docs/memory.md."""

    name: str
    num_bytes: int
    formula: str


@dataclass(frozen=True)
class MemoryBudget:
    """The parts of memory in use on one device at the same time, and the device's capacity in bytes."""

    device: str
    parts: tuple[Part, ...]
    capacity_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.num_bytes <= self.capacity_bytes


def nonzero(*parts: Part) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.num_bytes)


@dataclass(frozen=True)
class Hardware:
    """A node. `gpu_bytes` is one GPU's memory, `host_bytes` the node's memory for a job.

    The other fields are one GPU's peaks, in one direction: dense bfloat16 arithmetic, reading its memory, its link to
    another GPU of the node, its share of the network, its link to the host, and its share of the host's memory.
    """

    gpu_bytes: int
    host_bytes: int
    gpu_flops_per_s: float = 989e12
    gpu_bytes_per_s: float = 4.0e12
    nvlink_bytes_per_s: float = 150e9
    network_bytes_per_s: float = 25e9
    host_link_bytes_per_s: float = 450e9
    host_memory_bytes_per_s: float = 500e9


GH200 = Hardware(gpu_bytes=96 * GIB, host_bytes=460 * GIB)
"""The default hardware: four GH200, each with a 200 Gb/s network interface and a Grace CPU."""

# fmt: off
HARDWARE = {
    # GPU bytes, host bytes; for each GPU: FLOP/s, then bytes/s of its memory, NVLink, network, host link, host memory
    "gh200": GH200,
    "h100-sxm":  Hardware(80 * GIB,  900 * GIB, 989e12, 3.35e12, 450e9, 50e9, 64e9, 77e9),
    "h100-pcie": Hardware(80 * GIB,  900 * GIB, 756e12, 2.0e12,  64e9,  25e9, 64e9, 77e9),
    "h200":      Hardware(140 * GIB, 900 * GIB, 989e12, 4.8e12,  450e9, 50e9, 64e9, 77e9),
    "a100":      Hardware(80 * GIB,  900 * GIB, 312e12, 2.04e12, 300e9, 25e9, 32e9, 51e9),
}
# fmt: on
"""Nodes by name, from NVIDIA's data sheets. SXM boards as in DGX and HGX nodes: eight GPUs share two CPUs, and each GPU
has its own network interface (400 Gb/s, on A100 200 Gb/s). H100 PCIe: no NVLink; the GPUs of a node communicate over
PCIe. `a100` has 80 GB of memory.
"""

_NAMES = {"gh200": "gh200", "h200": "h200", "h100 pcie": "h100-pcie", "h100": "h100-sxm", "a100": "a100"}
"""Parts of a GPU's name in nvidia-smi -> key of HARDWARE. A longer part comes before one that it contains."""


def hardware_named(gpu_name: str) -> str | None:
    """Return the key of HARDWARE for a GPU name of nvidia-smi; None for another GPU.

    >>> hardware_named("NVIDIA H100 80GB HBM3"), hardware_named("NVIDIA GH200 120GB"), hardware_named("NVIDIA L4")
    ('h100-sxm', 'gh200', None)
    """
    return next((key for words, key in _NAMES.items() if words in gpu_name.lower()), None)


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter that DeepSpeed keeps on one learner for weights, gradients and the optimizer.

    `_whole` does not depend on the number of learners W; `_shard` is divided by W. The first five lie on the GPU, those
    with `host_` in host memory. `host_pinned_shard` are the sizes of page-locked arrays among them.

    Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), section 3: mixed-precision Adam keeps 2 (weights) + 2
    (gradients) + 12 (float32 weights and two moments) bytes a parameter; stage 1 divides the 12 by W, stage 2 the
    gradients too, stage 3 everything. Deviations here, since gradients are summed in float32 over microbatches
    (`grad_accum_dtype` in learner/setup.py): 4 bytes of gradients instead of 2, and what DeepSpeed 0.19.8 keeps beside
    them. Measured as the live tensors of a learner on CPU before its step, for W = 1 and 2; float32 rows of stages 1
    and 2 include the copy of the gradients that the step makes, and stage 1 with offload is read from the source.
    """

    weights_whole: int = 0
    weights_shard: int = 0
    gradients_whole: int = 0
    gradients_shard: int = 0
    optimizer_shard: int = 0
    host_optimizer_shard: int = 0
    host_gradients_shard: int = 0
    host_staging_shard: int = 0
    host_pinned_shard: tuple[int, ...] = ()


# fmt: off
STATES: dict[tuple[str, int, bool], StateBytes] = {
    # dtype, stage, offload              weights       gradients     optimizer  | host: optimizer, gradients, staging,
    #                                    whole shard   whole shard   shard      | page-locked
    ("bfloat16", 1, False): StateBytes(  2,    0,      6,    0,      12),
    ("bfloat16", 1, True):  StateBytes(  2,    0,      4,    4,      0,           12, 4, 2, (4, 4, 2)),
    ("bfloat16", 2, False): StateBytes(  2,    0,      0,    4,      12),
    ("bfloat16", 2, True):  StateBytes(  2,    0,      0,    4,      0,           12, 4, 2, (4, 4, 2)),
    ("bfloat16", 3, False): StateBytes(  0,    2,      0,    4,      12),
    ("bfloat16", 3, True):  StateBytes(  0,    2,      0,    0,      0,           12, 8, 0, (4,)),
    ("float32", 1, False):  StateBytes(  4,    0,      4,    4,      12),
    ("float32", 1, True):   StateBytes(  4,    0,      4,    0,      0,           12, 8, 4, (4, 4, 4)),
    ("float32", 2, False):  StateBytes(  4,    0,      0,    8,      12),
    ("float32", 2, True):   StateBytes(  4,    0,      0,    0,      0,           12, 8, 4, (4, 4, 4)),
    ("float32", 3, False):  StateBytes(  0,    4,      0,    4,      12),
    ("float32", 3, True):   StateBytes(  0,    4,      0,    0,      0,           12, 8, 0, (4,)),
}
# fmt: on
"""By the model's dtype, the ZeRO stage and whether the optimizer is offloaded; columns: the fields of `StateBytes`.

Stage 1 in bfloat16 has the gradients of the whole backward pass besides their float32 sum (BF16_Optimizer). Stage 3
with offload has the sum over microbatches, and the optimizer's copy of it.
"""


def pinned_rounding_bytes(arrays: Iterable[int]) -> int:
    """Return the bytes that page-locking adds to arrays of these sizes: torch rounds each up to a power of two.

    ATen/core/CachingHostAllocator.h, `PowerOf2Ceil`.

    >>> pinned_rounding_bytes([3 * 2**20, 4 * 2**20])
    1048576
    """
    return sum((1 << (num_bytes - 1).bit_length()) - num_bytes for num_bytes in arrays if num_bytes)


LOGIT_BYTES = 20
"""Bytes per logit of a chunk: in float32, and in four more arrays (normalised logits, probabilities, gradients)."""


@dataclass(frozen=True)
class Activations:
    """Bytes at the peak of a backward pass. `kept` is saved for the pass; `one_layer` and `head` never coexist.

    Counts as Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
    (arXiv:2205.05198), section 4: what autograd keeps for the backward pass, operation by operation. The operations are
    those of transformers' Llama and Qwen2 layers with a fused attention kernel (nothing of size T x T). Letters: `T`
    tokens of a microbatch, `d` hidden size, `a` and `k` channels of all query and of all key heads, `H` query heads,
    `f` intermediate size, `V` vocabulary, `L` layers, `b` bytes of the model's dtype, `c` tokens of a logits chunk.
    """

    kept: int
    one_layer: int
    head: int
    kept_formula: str

    @property
    def working(self) -> int:
        return max(self.one_layer, self.head)


def layer_bytes_per_token(shape: ModelShape, dtype_bytes: int) -> int:
    """Return (8 + 4 b) d + b (3 a + 2 k) + 4 H + 4 b f, and 2 b e d + 4 d with e experts a token.

    Two norms keep their float32 input (4 d each), the normalised value and their output (b d each). Attention keeps
    queries, keys, values and its output, which the output projection keeps again, and 4 bytes a head of log-sum-exps.
    The MLP keeps gate, its activation, up and their product. With experts, f is that of a token's experts together.
    Each of them keeps a copy of its input and its output, and the router its input in float32.
    """
    d, a, k, f, b = shape.hidden_size, shape.attention_size, shape.kv_size, shape.active_size, dtype_bytes
    of_experts = (2 * b * shape.experts_per_token + 4) * d if shape.num_experts else 0
    return (8 + 4 * b) * d + b * (3 * a + 2 * k) + 4 * shape.num_heads + 4 * b * f + of_experts


def activations(
    shape: ModelShape, dtype_bytes: int, num_tokens: int, chunk_tokens: int, *, is_checkpointed: bool
) -> Activations:
    """Return the peak of one microbatch of `num_tokens`.

    With gradient checkpointing (Chen et al. 2016, arXiv:1604.06174) only each layer's input is kept, b d a token.
    During a layer's backward pass its activations exist again, with gradients of about 2 b f. With e experts a token,
    three float32 arrays of their weighted outputs take 12 e d. The output layer computes logits in chunks, and adds up
    two weight gradients of the chunks.
    """
    per_layer = num_tokens * layer_bytes_per_token(shape, dtype_bytes)
    boundary = num_tokens * dtype_bytes * shape.hidden_size
    weighted = 12 * shape.experts_per_token * shape.hidden_size
    gradients = num_tokens * (2 * dtype_bytes * shape.active_size + weighted)
    chunk = min(chunk_tokens, num_tokens)
    head = chunk * shape.vocab_size * LOGIT_BYTES + 2 * dtype_bytes * shape.vocab_size * shape.hidden_size
    if is_checkpointed:
        return Activations(shape.num_layers * boundary, per_layer + gradients, head, "b d L T")
    return Activations(shape.num_layers * per_layer, gradients, head, "((8+4b) d + b (3a+2k) + 4H + 4b f) L T")
