"""Measure what a process uses: CPU seconds, memory, its GPUs, and its busy time in a step.

Every process of a run has one METER and one PULSE (run/pulse.py). A reading opens a few files of /proc.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from hpc_grpo.system.gpus import visible_gpus
from hpc_grpo.system.processes import children

_FETCH_EVERY_S = 5.0


@dataclass(frozen=True)
class Usage:
    """A process's usage since the previous reading, over `wall_s` seconds; current memory in bytes.

    `busy_s` are seconds in the process's own part of a step. `gpu_memory` is torch's maximum, None without a GPU.
    `gpu_utilization`, from 0 to 1, is the mean of its GPUs, None if it is not sampled.
    """

    wall_s: float
    cpu_s: float
    memory: int
    busy_s: float = 0.0
    gpu_memory: int | None = None
    gpu_utilization: float | None = None


class Meter:
    """Measures a process, with all its children, from one reading to the next. The first covers the process's life.

    It reads the process id only in `read`, so a meter inherited over a fork measures the child.
    """

    def __init__(self, pid: int | None = None) -> None:
        """Measure the process `pid`. Default: this process."""
        self._pid = pid
        self._read_at: float | None = None
        self._cpu_s = 0.0
        self._busy_s = 0.0
        self._gpus = GpuMeter()
        self._lock = threading.Lock()
        """The working thread adds to `busy_s`; another thread reads it."""

    def watch_gpus(self) -> None:
        """Measure from now on how busy the GPUs of this process are."""
        threading.Thread(target=self._gpus.keep_fetching, name="gpu-samples", daemon=True).start()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the block as the process's own part of a step."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add_busy(time.monotonic() - began)

    def add_busy(self, seconds: float) -> None:
        with self._lock:
            self._busy_s += seconds

    def read(self, *, with_children: bool = True) -> Usage:
        """Return the usage since the last reading. Raises psutil.NoSuchProcess for a process that has ended."""
        process, now = psutil.Process(self._pid), time.monotonic()
        if self._read_at is None:
            self._read_at = now - (time.time() - process.create_time())
        cpu_s, memory = _measured(process, with_children=with_children)
        with self._lock:
            busy_s, self._busy_s = self._busy_s, 0.0
        usage = Usage(
            wall_s=max(now - self._read_at, 0.0),
            cpu_s=max(cpu_s - self._cpu_s, 0.0),  # The seconds of a child that was not reaped are lost.
            memory=memory,
            busy_s=busy_s,
            gpu_memory=_gpu_memory() if self._pid is None else None,
            gpu_utilization=self._gpus.read(),
        )
        self._read_at, self._cpu_s = now, cpu_s
        return usage


class GpuMeter:
    """Averages how busy GPUs are: the share of time in which a kernel of any process ran.

    NVIDIA's driver samples this several times a second and keeps 100 samples, less than 20 s. A step takes longer, so a
    thread fetches the samples. Another thread reads the average: a hanging driver blocks no reading.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = self._count = 0
        self._seen_us: dict[int, int] = {}
        """Index of a GPU -> the driver's time of its last fetched sample."""

    def keep_fetching(self) -> None:
        """Fetch samples of this process's GPUs until it ends. Does nothing without nvidia-ml-py."""
        try:
            import pynvml
        except ImportError:
            return
        try:
            handles = find_handles(pynvml, visible_gpus(os.environ))
        except pynvml.NVMLError:
            return
        self.fetch(pynvml, handles)
        self.read()  # drop samples from before this process had its GPUs
        while handles:
            time.sleep(_FETCH_EVERY_S)
            self.fetch(pynvml, handles)

    def fetch(self, nvml: Any, handles: Sequence[Any]) -> None:
        for number, handle in enumerate(handles):
            seen_us = self._seen_us.get(number, 0)
            try:
                _, samples = nvml.nvmlDeviceGetSamples(handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, seen_us)
            except nvml.NVMLError:  # No new sample, or a GPU without sampling (MIG, vGPU).
                continue
            new = [sample for sample in samples if sample.timeStamp > seen_us]
            self._seen_us[number] = max((sample.timeStamp for sample in new), default=seen_us)
            with self._lock:
                self._sum += sum(sample.sampleValue.uiVal for sample in new)
                self._count += len(new)

    def read(self) -> float | None:
        """Return the mean of the samples since the last reading, from 0 to 1; None without samples."""
        with self._lock:
            total, count, self._sum, self._count = self._sum, self._count, 0, 0
        return total / count / 100.0 if count else None


def find_handles(nvml: Any, names: Sequence[str]) -> list[Any]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names by number or UUID. Raises NVMLError if NVML lacks one."""
    nvml.nvmlInit()
    by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
    return [by_index(int(name)) if name.isdecimal() else by_uuid(name) for name in names]


def _measured(process: psutil.Process, *, with_children: bool) -> tuple[float, int]:
    """Return the CPU seconds since a process's start, and its resident memory in bytes."""
    with process.oneshot():
        times, memory = process.cpu_times(), process.memory_info().rss
    cpu_s = times.user + times.system
    if not with_children:
        return cpu_s, memory
    cpu_s += times.children_user + times.children_system  # children that have ended
    for pid in children(process.pid):
        try:
            own_cpu_s, own_memory = _measured(psutil.Process(pid), with_children=True)
        except psutil.Error:  # It has ended, or is hidden as another user's.
            continue
        cpu_s, memory = cpu_s + own_cpu_s, memory + own_memory
    return cpu_s, memory


def _gpu_memory() -> int | None:
    """Return the maximum of torch's GPU memory in this process since the previous reading, in bytes."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    most = int(torch.cuda.max_memory_reserved())
    torch.cuda.reset_peak_memory_stats()
    return most


METER = Meter()
"""The meter of this process."""
