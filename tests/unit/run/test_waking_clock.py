from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from hpc_grpo.run.pulse import WakingClock


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_of_a_long_absence_only_so_much_counts() -> None:
    told = Clock()
    clock = WakingClock(told, most_s=10.0)
    for absence_s, counted_s in ((4.0, 4.0), (3600.0, 14.0), (5.0, 19.0)):
        told.now += absence_s
        assert clock.read() == counted_s
        assert clock.look() == counted_s


@pytest.mark.parametrize("stopped_s", [0.0, 1.0])
def test_the_time_in_which_a_process_is_stopped_does_not_count(stopped_s: float) -> None:
    program = (
        "import time; from hpc_grpo.run.pulse import WakingClock\n"
        "begun, clock = time.monotonic(), WakingClock(most_s=0.25); clock.keep_looking(every_s=0.05)\n"
        "print('up', flush=True); input()\n"
        "time.sleep(0.2); counted_s = clock.read(); print(time.monotonic() - begun, counted_s)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    begun = time.monotonic()
    if stopped_s:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        begun = time.monotonic()
        time.sleep(stopped_s)
        process.send_signal(signal.SIGCONT)
    passed_s, counted_s = map(float, process.communicate(b"\n", timeout=60)[0].split())
    assert 0.2 <= counted_s <= passed_s - max(0.0, stopped_s - 0.25) + 0.05, begun
