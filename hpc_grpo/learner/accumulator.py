"""Metrics of a step's microbatches, summed where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_grpo.algorithms.losses.base import LossOutput
from hpc_grpo.algorithms.objective import TokenWeights
from hpc_grpo.metrics.reductions import EffectiveSampleSize, Max, Mean, Reduction


class MetricAccumulator:
    """Sums per-token metrics on the device and reads them once: reading one in every microbatch would stall a GPU."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

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
        if not self._sums:
            return {}
        values = torch.stack([*self._sums.values(), *self._maxima.values()]).tolist()
        sums = dict(zip(self._sums, values, strict=False))
        tokens, divisor_share = sums["count", "tokens"], sums["count", "loss"]
        reduced: dict[str, Reduction] = {}
        for (kind, name), total in sums.items():
            if kind in ("mean", "term"):
                reduced[name] = Mean(total, tokens if kind == "mean" else divisor_share)
            elif kind == "weight":
                reduced[name] = EffectiveSampleSize(total, sums["square", name], tokens)
        maxima = zip(self._maxima, values[len(sums) :], strict=True)
        return reduced | {name: Max(value) for name, value in maxima}
