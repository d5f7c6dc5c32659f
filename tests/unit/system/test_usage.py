from __future__ import annotations

import os
import time

import psutil
import pytest

from hpc_grpo.system import usage
from hpc_grpo.system.processes import children
from hpc_grpo.system.usage import Meter
from tests.support.processes import start

BURNING = "import time\nwhile time.process_time() < {}: pass\n"


def test_a_reading_counts_since_the_one_before() -> None:
    meter = Meter()
    first = meter.read()
    assert first.wall_s >= first.cpu_s * 0.01 > 0.0
    assert first.memory > 1 << 20
    with meter.busy():
        time.sleep(0.02)
    meter.add_busy(1.0)
    second = meter.read()
    assert 1.02 <= second.busy_s < 2.0 + second.wall_s
    assert 0.02 <= second.wall_s < first.wall_s + 60.0
    assert meter.read().busy_s == 0.0


def test_what_another_thread_adds_during_a_reading_counts_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    meter.add_busy(1.0)
    monkeypatch.setattr(usage, "_gpu_memory", lambda: meter.add_busy(2.0))
    assert [meter.read().busy_s for _ in range(2)] == [1.0, 2.0]


def test_what_a_process_has_started_counts_as_its_own_also_after_its_end() -> None:
    burnt = BURNING.format("0.1")
    process = start(
        "import subprocess, sys, time\n"
        f"subprocess.run([sys.executable, '-c', {burnt!r}], check=True)\n"
        "living = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "print('ready', flush=True); time.sleep(100)"
    )
    try:
        (child,) = children(process.pid)
        alone, together = Meter(process.pid).read(with_children=False), Meter(process.pid).read()
        assert together.cpu_s >= alone.cpu_s + 0.1 - 0.02
        assert together.memory > alone.memory
    finally:
        os.kill(child, 9)
        process.kill()
        process.wait()
    with pytest.raises(psutil.NoSuchProcess):
        Meter(process.pid).read()


def test_processes_that_are_gone_have_no_children() -> None:
    process = start("print('ready', flush=True)")
    process.wait()
    assert children(process.pid) == []
