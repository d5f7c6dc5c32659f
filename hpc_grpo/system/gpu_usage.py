"""Measure how busy this process's GPUs are: the share of the time in which a kernel ran, whichever process's it was.

NVIDIA's driver samples that several times a second and keeps the last 100 samples, less than 20 s: a step takes longer,
so a thread fetches them while it runs. Per process the driver tells only a rate of that moment, and of processes by
numbers that a container does not know.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc_grpo.system.affinity import visible_gpus

_FETCH_EVERY_S = 5.0


@dataclass
class SampledGpu:
    """A GPU, by its handle of NVML. `seen_us` is the driver's time of the last sample that was fetched."""

    handle: Any
    seen_us: int = 0

    def fetch(self, nvml: Any) -> list[int]:
        """Return the percentages sampled since the call before; none of a GPU that is not sampled (MIG, vGPU)."""
        try:
            _, samples = nvml.nvmlDeviceGetSamples(self.handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self.seen_us)
        except nvml.NVMLError:  # also where there is no new one
            return []
        new = [sample for sample in samples if sample.timeStamp > self.seen_us]
        self.seen_us = max((sample.timeStamp for sample in new), default=self.seen_us)
        return [sample.sampleValue.uiVal for sample in new]


def find_sampled_gpus(nvml: Any, names: Sequence[str]) -> list[SampledGpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names by number or UUID. Raises NVMLError where NVML lacks one."""
    nvml.nvmlInit()
    return [
        SampledGpu(
            nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
        )
        for name in names
    ]


class GpuMeter:
    """Averages the utilization of GPUs from one reading to the next.

    One thread fetches the samples, another one reads: a driver that hangs holds up no reading.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = self._count = 0

    def keep_fetching(self) -> None:
        """Have a thread fetch the samples of this process's GPUs as long as it runs, where nvidia-ml-py is there."""
        threading.Thread(target=self._keep_on, name="gpu-samples", daemon=True).start()

    def fetch(self, nvml: Any, gpus: Sequence[SampledGpu]) -> None:
        percents = [percent for gpu in gpus for percent in gpu.fetch(nvml)]
        with self._lock:
            self._sum, self._count = self._sum + sum(percents), self._count + len(percents)

    def read(self) -> float | None:
        """Return the mean of what was fetched since the reading before, from 0 to 1; None of no sample."""
        with self._lock:
            total, count, self._sum, self._count = self._sum, self._count, 0, 0
        return total / count / 100.0 if count else None

    def _keep_on(self) -> None:
        try:
            import pynvml
        except ImportError:
            return
        try:
            gpus = find_sampled_gpus(pynvml, visible_gpus(os.environ))
        except pynvml.NVMLError:
            return
        self.fetch(pynvml, gpus)
        self.read()  # sampled before this process had its GPUs
        while gpus:
            time.sleep(_FETCH_EVERY_S)
            self.fetch(pynvml, gpus)
