"""Prepare an optimizer step before its microbatches: which sequences are computed at all, and what a loss wants to
know of all their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpc_grpo.algorithms.objective import Objective, Preparation
from hpc_grpo.algorithms.terms import LossInputs
from hpc_grpo.learner.accumulator import MetricAccumulator
from hpc_grpo.learner.group import of_all_ranks
from hpc_grpo.learner.packing import PackedBatch
from hpc_grpo.metrics.reductions import Mean, Reduction
from hpc_grpo.types import TrainSequence


def without_still(
    shares: Sequence[Sequence[TrainSequence]], objective: Objective, accumulator: MetricAccumulator
) -> tuple[list[tuple[TrainSequence, ...]], dict[str, Reduction]]:
    """Leave out of each minibatch the sequences whose advantages are all 0, and tell their share of its tokens.

    They stay in the divisor of the loss, where `accumulator` counts them: only where they have no gradient
    (`Objective.is_still_without_advantage`) is the step the same without them.
    """
    moving = [tuple(sequence for sequence in share if sequence.advantages.any()) for share in shares]
    still = [sequence for share in shares for sequence in share if not sequence.advantages.any()]
    num_tokens, num_still = sum(map(_count_tokens, shares)), _count_tokens(still)
    accumulator.leave_out(num_still if objective.denominator == "tokens" else len(still))
    return moving, {"tokens/left_out_fraction": Mean(num_still, num_tokens)}


def _count_tokens(sequences: Sequence[TrainSequence]) -> int:
    return sum(sequence.num_trained_tokens for sequence in sequences)


def prepared(
    preparations: Mapping[str, Preparation],
    batches: Sequence[PackedBatch],
    proximal: Sequence[Tensor | None],
) -> dict[str, Any]:
    """Return what the loss and its correction make of all tokens of an optimizer step, over all ranks: a collective."""
    if not preparations:
        return {}
    columns = [
        torch.stack([anchor, batch.engine_logprobs, batch.advantages, batch.draws, batch.mask])
        for batch, anchor in zip(batches, proximal, strict=True)
        if anchor is not None
    ]
    rows = of_all_ranks(torch.cat(columns, dim=1))
    is_trained = rows[-1] > 0.0
    # A step of nothing but filling still has its passes.
    anchors, engine, advantages, draws, _ = rows[:, is_trained] if is_trained.any() else torch.zeros_like(rows)
    one_sequence = torch.zeros_like(anchors, dtype=torch.int64)
    whole = LossInputs(anchors, anchors, engine, None, advantages, one_sequence, draws=draws)
    return {name: prepare(whole) for name, prepare in preparations.items()}
