"""The signature of every policy loss. Importing it needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from hpc_grpo.config import LossConfig


@dataclass(frozen=True)
class LossInputs:
    """The trained tokens of a microbatch; every tensor has shape `[C]`, all but `sequence_ids` are float32.

    `learner_logprobs` alone carry a gradient. `proximal_logprobs` are those of the learner at the start of the step.
    `ref_logprobs` is None when there is no reference model, `teacher_logprobs` when there is no teacher. `sequence_ids`
    (int64) number the sequences of the microbatch from 0, in order: a sequence is never cut, so a loss may sum or
    average over it. `entropy` carries a gradient with `loss.entropy_coef`. `draws` are uniform in [0, 1) and a token's
    own, to choose tokens at random: the same however a step is cut. `of_minibatch` holds numbers that `prepare`
    functions made of all tokens of the optimizer step, over all microbatches and ranks, by the name of the loss or
    correction.
    """

    learner_logprobs: Tensor
    proximal_logprobs: Tensor
    engine_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    sequence_ids: Tensor
    entropy: Tensor | None = None
    draws: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    of_minibatch: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """`per_token` `[C]` is what is summed and divided by `loss.denominator`, over all microbatches and learners.

    The others hold per-token `[C]` quantities without gradient, by metric name. `terms` are parts of the loss, reduced
    as it is; `means` and `maxima` are reduced over valid tokens; `weights` to their effective sample size.
    """

    per_token: Tensor
    means: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    terms: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


class PolicyLoss(Protocol):
    """Gives the policy's own term: corrections, KL and entropy are added around it (`algorithms/objective.py`)."""

    def __call__(self, inputs: LossInputs, settings: LossConfig) -> LossOutput: ...
