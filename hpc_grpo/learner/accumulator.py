"""Metrics of a step, summed on the device and read once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hpc_grpo.metrics.reductions import Max, Mean, Reduction


class MetricAccumulator:
    """Collects per-token metrics over microbatches. Reading a value every time would stall a GPU."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._num_tokens: Tensor | None = None

    def add(self, mask: Tensor, means: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> None:
        """Add a microbatch's per-token quantities, each `[C]`, where `mask` `[C]` is 1.0."""
        count = mask.sum()
        self._num_tokens = count if self._num_tokens is None else self._num_tokens + count
        for name, values in means.items():
            total = torch.dot(values, mask)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        for name, values in maxima.items():
            largest = (values * mask).max()
            self._maxima[name] = torch.maximum(self._maxima[name], largest) if name in self._maxima else largest

    def reductions(self) -> dict[str, Reduction]:
        if self._num_tokens is None:
            return {}
        values = torch.stack([self._num_tokens, *self._sums.values(), *self._maxima.values()]).tolist()
        count, sums, maxima = values[0], values[1 : 1 + len(self._sums)], values[1 + len(self._sums) :]
        reduced: dict[str, Reduction] = {name: Mean(total, count) for name, total in zip(self._sums, sums, strict=True)}
        reduced.update({name: Max(value) for name, value in zip(self._maxima, maxima, strict=True)})
        return reduced
