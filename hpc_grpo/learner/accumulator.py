"""Metrics of a step's microbatches, summed where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_grpo.algorithms.objective import TokenWeights
from hpc_grpo.algorithms.terms import LossOutput
from hpc_grpo.metrics.reductions import EffectiveSampleSize, Max, Mean, Reduction


class MetricAccumulator:
    """Sums per-token metrics on the device and reads them once: reading one in every microbatch would stall a GPU."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._still_units = 0

    def leave_out(self, units: int) -> None:
        """Count what is in the divisor of the loss without having been computed: its terms are 0 there."""
        self._still_units += units

    def add(self, mask: Tensor, output: LossOutput, weights: TokenWeights) -> None:
        """Add a microbatch's per-token quantities, each `[C]`, where `mask` `[C]` is 1.0."""
        self._add("count", "tokens", mask.sum())
        self._add("count", "loss", weights.units)
        for name, values in output.means.items():
            self._add("mean", name, torch.dot(values, mask))
        for name, values in output.terms.items():
            self._add("term", name, torch.dot(values, weights.of_tokens))
        for name, values in output.weights.items():
            self._add("weight", name, torch.dot(values, mask))
            self._add("square", name, torch.dot(values.square(), mask))
        for name, values in output.maxima.items():
            largest = (values * mask).max()
            self._maxima[name] = torch.maximum(self._maxima[name], largest) if name in self._maxima else largest

    def _add(self, kind: str, name: str, total: Tensor) -> None:
        key = (kind, name)
        self._sums[key] = self._sums[key] + total if key in self._sums else total

    def reductions(self) -> dict[str, Reduction]:
        """Return the means over the tokens that were computed, and the terms of the loss over all.

        A rank without a token has no means: the others' are not to be mixed with zeros.
        """
        if not self._sums:
            return {}
        values = torch.stack([*self._sums.values(), *self._maxima.values()]).tolist()
        sums = dict(zip(self._sums, values, strict=False))
        tokens, divisor_share = sums["count", "tokens"], sums["count", "loss"] + self._still_units
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
