"""The freeze table: each process of a run, stopped (SIGSTOP) in each phase, with the deadlines of the defaults.

Minutes a row, so that all are `long`; `test_freezes` has rows for every day. On two nodes: tests/slurm/test_freezes.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from hpc_grpo.run.files import read_jsonl
from tests.integration.training_runs import LETTERS, Attempt, metrics_of, tiny_config
from tests.support.freezing import PHASES, ROLES, driver_beat, pids

pytestmark = [pytest.mark.integration, pytest.mark.long]

SAID = ("was stopped", "gave no sign of life", "did not end within")
NOTICED_WITHIN_S = 200.0
_END_S = 240.0
_LOST_BY_S = 10.0
"""A node is reported lost within this time after its Ray was ended."""


@dataclass(frozen=True)
class Row:
    role: str
    phase: str
    noticed_s: float
    said: str
    ended: str

    titles: ClassVar = ("process", "stopped while", "noticed s", "said", "ended")

    def __str__(self) -> str:
        return f"| {self.role} | {self.phase} | {self.noticed_s:.0f} | {self.said} | {self.ended} |"


def stop_one(attempt: Attempt, role: str, phase: str) -> psutil.Process:
    """Stop a process of this role as soon as the driver is in this phase.

    A reward worker starts with the first grading, when the driver's start is over: it is stopped in its own.
    """
    starts_late = role == "reward worker" and phase == "starting"
    supervisor, run = attempt.process.pid, attempt.run_dir.path
    found: list[int] = []

    def is_time() -> bool:
        found[:] = pids(supervisor, role, run)
        return bool(found) and (starts_late or driver_beat(supervisor).work == PHASES[phase])

    attempt.wait_until(is_time, f"{role} while {phase}")
    os.kill(found[0], signal.SIGSTOP)
    return psutil.Process(found[0])


def last_step(attempt: Attempt) -> int:
    return max((line["step"] for line in read_jsonl(attempt.run_dir.ledger)), default=0)


def word_of_it(attempt: Attempt, role: str, stopped: psutil.Process) -> str:
    """The sentence that tells of it, "" as long as there is none; of a reward worker only its end tells."""
    for line in attempt.text.splitlines():
        if any(phrase in line for phrase in SAID):
            return line.split("|")[-1].strip()
    return "it was killed, and its call made again" if role == "reward worker" and not stopped.is_running() else ""


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("role", ROLES)
def test_a_process_that_is_stopped(role: str, phase: str, workspace: Path, show: Callable[[str], None]) -> None:
    config = tiny_config(
        workspace,
        f"stopped-{role.replace(' ', '-')}-{phase}",
        train={"total_steps": 5000, "lr": 1e-4},
        rewards=[{"name": LETTERS, "args": {"delay_s": 0.1}}],
    )
    with Attempt(config) as attempt:
        if phase != "starting":
            attempt.wait_for_step(3)
        stopped = stop_one(attempt, role, phase)
        begun = time.monotonic()
        try:
            said = ""
            while not (said := word_of_it(attempt, role, stopped)) and attempt.process.poll() is None:
                assert time.monotonic() - begun < NOTICED_WITHIN_S, attempt.text
                time.sleep(0.2)
            noticed_s = time.monotonic() - begun
            show(str(Row(role, phase, noticed_s, said, how_it_ends(attempt, last_step(attempt)))))
            assert said, attempt.text
        finally:
            if stopped.is_running():
                stopped.kill()
    if role == "reward worker":
        assert not any(values["reward/invalid_fraction"] for values in metrics_of(attempt.run_dir).values())
    job = attempt.record()["job_id"]
    assert not [*Path("/dev/shm").glob(f"hg-{job}-*"), *Path("/tmp").glob(f"hg-{job}-*")]
    assert not stopped.is_running()


def how_it_ends(attempt: Attempt, after_step: int) -> str:
    """Either the run goes on for two steps, and is then asked to stop, or the attempt ends by itself."""
    begun = time.monotonic()

    def is_settled() -> bool:
        """The driver takes steps until it is ended for a lost node, which is known only after a while."""
        is_lost = time.monotonic() - begun < _LOST_BY_S or "Lost node" in attempt.text
        return last_step(attempt) >= after_step + 3 and not is_lost

    while attempt.process.poll() is None and not is_settled():
        assert time.monotonic() - begun < _END_S, attempt.text
        time.sleep(0.2)
    goes_on = attempt.process.poll() is None
    attempt.run_dir.stop_marker.touch()
    code = attempt.wait()
    attempt.run_dir.stop_marker.unlink()
    replaced = "; it was replaced" if "; starting another" in attempt.text else ""
    return f"the run went on{replaced}" if goes_on else f"exit code {code} ({attempt.record()['exit_kind']})"
