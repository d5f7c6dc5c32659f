"""One optimizer step of a DeepSpeed engine. The number of microbatches differs from step to step."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.run.pulse import PULSE
from hpc_grpo.system.usage import METER

Loss = Callable[[], Tensor]
"""Computes the sum of the token losses of a microbatch, with gradient."""


def optimizer_step(ds_engine: Any, losses: Sequence[Loss], divisor: int, model: str, lr_key: str) -> float | None:
    """Accumulate the gradients of the microbatches and step. Return the gradient's norm before clipping.

    The sum of the losses is divided by `divisor`: the trained tokens, or the sequences, of all ranks. With divisor 0,
    every rank skips the step and returns None. Raises HpcGrpoError if the gradient is not finite: DeepSpeed would drop
    the update, and a checkpoint would hold a state that cannot be resumed.
    """
    if not divisor:
        _skip(ds_engine)
        return None
    # DeepSpeed averages gradients over ranks. Undo this, and divide their sum by `divisor`.
    scale = ds_engine.dp_world_size / divisor
    # Busy time ends at the last backward pass, which waits for the other ranks. A GPU's events measure when its work
    # ends, not when the work was launched.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if ds_engine.device.type == "cuda" else []
    begun = busy_until = time.monotonic()
    if events:
        events[0].record()
    for index, loss in enumerate(losses):
        is_last = index == len(losses) - 1
        ds_engine.set_gradient_accumulation_boundary(is_last)
        scaled = loss() * scale
        if is_last:
            busy_until = time.monotonic()
            if events:
                events[1].record()
        ds_engine.backward(scaled, scale_wrt_gas=False)
        del scaled  # otherwise its graph would stay in memory during the next microbatch
        PULSE.beat()
    ds_engine.step()
    grad_norm = float(ds_engine.get_global_grad_norm())  # synchronises a GPU
    METER.add_busy(events[0].elapsed_time(events[1]) / 1e3 if events else busy_until - begun)
    if not math.isfinite(grad_norm):
        raise HpcGrpoError(
            f"The gradient of the {model} in optimizer step {ds_engine.global_steps} is not finite ({grad_norm}). "
            f"Give a new run.name and a lower {lr_key}, or check that step's rollouts for broken logprobs or rewards."
        )
    return grad_norm


def _skip(ds_engine: Any) -> None:
    """Count a step without a trained token, and change no weights: old momentum and weight decay must not act.

    Counts the step like DeepSpeed counts skipped steps, so versions advance. The learning rate follows its schedule.
    """
    ds_engine.global_steps += 1
    ds_engine.skipped_steps += 1
    if ds_engine.lr_scheduler is None:
        return
    with warnings.catch_warnings():
        # If the very first step is skipped, torch warns that the schedule runs before the optimizer.
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before")
        ds_engine.lr_scheduler.step()
