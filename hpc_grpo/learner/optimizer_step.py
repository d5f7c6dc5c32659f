"""One optimizer step of a DeepSpeed engine over microbatches whose number only the learner knows."""

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


def optimizer_step(ds_engine: Any, losses: Sequence[Loss], divisor: int, whose: str, lr_key: str) -> float | None:
    """Accumulate the gradients of the microbatches and step; returns the gradient's norm before clipping.

    `divisor` counts the trained tokens, or the sequences, of all ranks: the sum of the losses is divided by it. Where
    it is 0 the step is skipped on every rank, and None returned. `whose` model it is and the key of its learning rate
    are for the error. Raises HpcGrpoError when the gradient is not finite: DeepSpeed then drops that update, and a
    checkpoint would hold what cannot be resumed.
    """
    if not divisor:
        _skip(ds_engine)
        return None
    # DeepSpeed averages gradients over ranks; the loss wants their sum over the divisor.
    scale = ds_engine.dp_world_size / divisor
    own = _OwnWork(ds_engine.device)
    for index, loss in enumerate(losses):
        is_last = index == len(losses) - 1
        ds_engine.set_gradient_accumulation_boundary(is_last)
        scaled = loss() * scale
        if is_last:
            own.ends()
        ds_engine.backward(scaled, scale_wrt_gas=False)
        del scaled  # or its graph would live beside the next one
        PULSE.beat()
    ds_engine.step()
    grad_norm = float(ds_engine.get_global_grad_norm())
    METER.add_busy(own.seconds())
    if not math.isfinite(grad_norm):
        raise HpcGrpoError(
            f"The gradient of the {whose} in optimizer step {ds_engine.global_steps} is not finite ({grad_norm}). "
            f"Give a new run.name and a lower {lr_key}, or look at that step's rollouts for broken logprobs or rewards."
        )
    return grad_norm


class _OwnWork:
    """Times what this rank computes up to its last backward pass, at whose end it waits for the other ranks.

    Under ZeRO-2 and ZeRO-3 ranks wait for each other in every microbatch, so there all take about as long.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin. A GPU's own clock tells what it has computed, not when it was asked to."""
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._began = self._ended = time.monotonic()
        if self._events:
            self._events[0].record()

    def ends(self) -> None:
        self._ended = time.monotonic()
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """Return the time; on a GPU after a synchronisation, which the gradient's norm has been."""
        return self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events else self._ended - self._began


def _skip(ds_engine: Any) -> None:
    """Count a step that has nothing to train on: neither old momentum nor weight decay may move the weights.

    Counted as DeepSpeed counts those it skips, so that versions go on; the learning rate is that of its step.
    """
    ds_engine.global_steps += 1
    ds_engine.skipped_steps += 1
    if ds_engine.lr_scheduler is None:
        return
    with warnings.catch_warnings():
        # Where the first step of all is skipped, torch takes a schedule that goes first for a mistake.
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before")
        ds_engine.lr_scheduler.step()
