"""Metrics of a step's microbatches, and how far engine and learner disagree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpc_grpo.algorithms.objective import TokenWeights
from hpc_grpo.algorithms.terms import LossOutput, kl_k3
from hpc_grpo.learner.model import PolicyModel, score
from hpc_grpo.learner.packing import PackedBatch
from hpc_grpo.metrics.reductions import EffectiveSampleSize, Max, Mean, Reduction


class MetricAccumulator:
    """Sums per-token metrics on the device and reads them once: reading one in every microbatch would stall a GPU."""

    def __init__(self) -> None:
        self.left_out = 0
        """Tokens or sequences in the divisor of the loss that were not computed: their terms are 0."""
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, mask: Tensor, output: LossOutput, weights: TokenWeights) -> None:
        """Add a microbatch's per-token quantities, each `[C]`, where `mask` `[C]` is 1.0."""
        own = {("count", "tokens"): mask.sum(), ("count", "loss"): weights.units}
        own |= {("mean", name): torch.dot(values, mask) for name, values in output.means.items()}
        own |= {("term", name): torch.dot(values, weights.of_tokens) for name, values in output.terms.items()}
        own |= {("weight", name): torch.dot(values, mask) for name, values in output.weights.items()}
        own |= {("square", name): torch.dot(values.square(), mask) for name, values in output.weights.items()}
        self._sums |= {key: self._sums[key] + total if key in self._sums else total for key, total in own.items()}
        for name, values in output.maxima.items():
            largest = (values * mask).max()
            self._maxima[name] = torch.maximum(self._maxima.get(name, largest), largest)

    def reductions(self) -> dict[str, Reduction]:
        """Return the means over the tokens that were computed, and the terms of the loss over all.

        A rank without a token has no means: the others' are not to be mixed with zeros.
        """
        if not self._sums:
            return {}
        values = torch.stack([*self._sums.values(), *self._maxima.values()]).tolist()
        sums = dict(zip(self._sums, values, strict=False))
        tokens, divisor_share = sums["count", "tokens"], sums["count", "loss"] + self.left_out
        reduced: dict[str, Reduction] = {}
        for (kind, name), total in sums.items():
            if kind == "term":
                reduced[name] = Mean(total, divisor_share)
            elif kind == "mean" and tokens:
                reduced[name] = Mean(total, tokens)
            elif kind == "weight" and tokens:
                reduced[name] = EffectiveSampleSize(total, sums["square", name], tokens)
        maxima = zip(self._maxima, values[len(sums) :], strict=True)
        return reduced | {name: Max(value) for name, value in maxima if tokens}


def mismatch(model: PolicyModel, batches: Sequence[PackedBatch]) -> dict[str, Reduction]:
    """Compare the logprobs of engine and learner; no metrics from a rank without tokens. A collective under ZeRO-3.

    `mismatch/kl` estimates KL(engine || learner) from tokens that the engine sampled, trained on or not.
    """
    is_sampled = torch.cat([batch.mask for batch in batches]) > 0.0
    learner = torch.cat([score(model, batch) for batch in batches])[is_sampled]
    engine = torch.cat([batch.engine_logprobs for batch in batches])[is_sampled]
    if not len(learner):
        return {}
    difference = (learner - engine).abs()
    return {
        "mismatch/logprob_abs_diff_mean": Mean(float(difference.sum()), len(learner)),
        "mismatch/logprob_abs_diff_max": Max(float(difference.max())),
        "mismatch/kl": Mean(float(kl_k3(engine, learner).sum()), len(learner)),
    }
