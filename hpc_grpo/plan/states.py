"""Bytes a parameter that DeepSpeed keeps for weights, gradients and the optimizer.

Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), section 3: mixed-precision Adam keeps 2 (weights) + 2 (gradients)
+ 12 (float32 weights and two moments) bytes a parameter; stage 1 divides the 12 by the learners W, stage 2 the
gradients too, stage 3 everything. Deviations here, since gradients are summed in float32 over microbatches
(`grad_accum_dtype` in learner/deepspeed_config.py): 4 bytes of gradients instead of 2, and what DeepSpeed 0.19.8
keeps beside them. Measured as the live tensors of a learner on CPU before its step, for W = 1 and 2; float32 rows of
stages 1 and 2 include the copy of the gradients that the step makes, and stage 1 with offload is read from the source.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpc_grpo.config import Config


@dataclass(frozen=True)
class StateBytes:
    """Bytes a parameter on one learner. `_whole` does not depend on W; `_shard` is divided by W.

    The first five lie on the GPU, those with `host_` in host memory. `host_pinned_shard` are the sizes of page-locked
    arrays among them, each in bytes a parameter.
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


_STATES: dict[tuple[str, int, bool], StateBytes] = {
    # bfloat16 gradients of the whole backward pass beside their float32 sum: BF16_Optimizer
    ("bfloat16", 1, False): StateBytes(weights_whole=2, gradients_whole=6, optimizer_shard=12),
    ("bfloat16", 1, True): StateBytes(
        weights_whole=2,
        gradients_whole=4,
        gradients_shard=4,
        host_optimizer_shard=12,
        host_gradients_shard=4,
        host_staging_shard=2,
        host_pinned_shard=(4, 4, 2),
    ),
    ("bfloat16", 2, False): StateBytes(weights_whole=2, gradients_shard=4, optimizer_shard=12),
    ("bfloat16", 2, True): StateBytes(
        weights_whole=2,
        gradients_shard=4,
        host_optimizer_shard=12,
        host_gradients_shard=4,
        host_staging_shard=2,
        host_pinned_shard=(4, 4, 2),
    ),
    ("bfloat16", 3, False): StateBytes(weights_shard=2, gradients_shard=4, optimizer_shard=12),
    # the sum over microbatches, and the optimizer's own copy of it
    ("bfloat16", 3, True): StateBytes(
        weights_shard=2, host_optimizer_shard=12, host_gradients_shard=8, host_pinned_shard=(4,)
    ),
    ("float32", 1, False): StateBytes(weights_whole=4, gradients_whole=4, gradients_shard=4, optimizer_shard=12),
    ("float32", 1, True): StateBytes(
        weights_whole=4,
        gradients_whole=4,
        host_optimizer_shard=12,
        host_gradients_shard=8,
        host_staging_shard=4,
        host_pinned_shard=(4, 4, 4),
    ),
    ("float32", 2, False): StateBytes(weights_whole=4, gradients_shard=8, optimizer_shard=12),
    ("float32", 2, True): StateBytes(
        weights_whole=4,
        host_optimizer_shard=12,
        host_gradients_shard=8,
        host_staging_shard=4,
        host_pinned_shard=(4, 4, 4),
    ),
    ("float32", 3, False): StateBytes(weights_shard=4, gradients_shard=4, optimizer_shard=12),
    ("float32", 3, True): StateBytes(
        weights_shard=4, host_optimizer_shard=12, host_gradients_shard=8, host_pinned_shard=(4,)
    ),
}


def state_bytes(config: Config) -> StateBytes:
    """The row for the config's dtype, ZeRO stage and offload; super_offload keeps what stage 3 with cpu does."""
    is_offloaded = config.train.offload_optimizer != "none"
    return _STATES[config.model.dtype, config.train.zero_stage, is_offloaded]


def pinned_rounding_bytes(arrays: Iterable[int]) -> int:
    """What page-locking adds to arrays of these sizes: torch's host allocator rounds each up to a power of two.

    ATen/core/CachingHostAllocator.h, `PowerOf2Ceil`.

    >>> pinned_rounding_bytes([3 * 2**20, 4 * 2**20])
    1048576
    """
    return sum((1 << (num_bytes - 1).bit_length()) - num_bytes for num_bytes in arrays if num_bytes)
