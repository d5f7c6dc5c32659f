"""Measure what a process uses: CPU seconds, memory, its GPUs, and how long it was busy with its part of a step.

Every process of a run has one METER, as it has one PULSE (run/pulse.py). A reading opens a few files of /proc.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from hpc_grpo.system.gpu_usage import GpuMeter
from hpc_grpo.system.processes import children


@dataclass(frozen=True)
class Usage:
    """Hold what a process used since the reading before, over `wall_s` seconds; memory as it is now, in bytes.

    `busy_s`: of these seconds, those in its own part of a step. `gpu_memory` is torch's most, None without a GPU.
    `gpu_utilization`, from 0 to 1, is the mean of its GPUs, None where nobody samples them.
    """

    wall_s: float
    cpu_s: float
    memory: int
    busy_s: float = 0.0
    gpu_memory: int | None = None
    gpu_utilization: float | None = None


class Meter:
    """Measures a process, with all that it has started, from one reading to the next; the first counts from its start.

    Looks at a process only when it is read, so that one inherited over a fork measures the child.
    """

    def __init__(self, pid: int | None = None) -> None:
        """Measure the process `pid`, None: this one."""
        self._pid = pid
        self._read_at: float | None = None
        self._cpu_s = 0.0
        self._busy_s = 0.0
        self._gpus = GpuMeter()
        self._lock = threading.Lock()
        """The thread that works adds to `busy_s`, another one reads."""

    def watch_gpus(self) -> None:
        """Measure from here on how busy the GPUs are that this process was given."""
        self._gpus.keep_fetching()

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
        """Return what was used since the reading before. Raises psutil.NoSuchProcess for a process that is gone."""
        process, now = psutil.Process(self._pid), time.monotonic()
        if self._read_at is None:
            self._read_at = now - (time.time() - process.create_time())
        cpu_s, memory = _measured(process, with_children=with_children)
        with self._lock:
            busy_s, self._busy_s = self._busy_s, 0.0
        usage = Usage(
            wall_s=max(now - self._read_at, 0.0),
            cpu_s=max(cpu_s - self._cpu_s, 0.0),  # a child that nobody waited for has taken its seconds with it
            memory=memory,
            busy_s=busy_s,
            gpu_memory=_gpu_memory() if self._pid is None else None,
            gpu_utilization=self._gpus.read(),
        )
        self._read_at, self._cpu_s = now, cpu_s
        return usage


def _measured(process: psutil.Process, *, with_children: bool) -> tuple[float, int]:
    """Return the CPU seconds since a process's start, and its resident memory in bytes."""
    with process.oneshot():
        times, memory = process.cpu_times(), process.memory_info().rss
    cpu_s = times.user + times.system
    if not with_children:
        return cpu_s, memory
    cpu_s += times.children_user + times.children_system  # those that have ended
    for pid in children(process.pid):
        try:
            own_cpu_s, own_memory = _measured(psutil.Process(pid), with_children=True)
        except psutil.Error:  # it has ended, or is another user's on a site that hides those
            continue
        cpu_s, memory = cpu_s + own_cpu_s, memory + own_memory
    return cpu_s, memory


def _gpu_memory() -> int | None:
    """Return the most that torch held of this process's GPU since the reading before, in bytes."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    most = int(torch.cuda.max_memory_reserved())
    torch.cuda.reset_peak_memory_stats()
    return most


METER = Meter()
"""That of this process."""
