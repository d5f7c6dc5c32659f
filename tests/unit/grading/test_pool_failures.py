"""Rewards that raise, hang or end their process. Waits are for conditions; deadlines only bound a failing test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.grading import pool as slot
from hpc_grpo.grading.pool import RewardPool
from tests.support.processes import gone, wait_until


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("raise", "Odd: first second é"),
        ("exit", "SystemExit: bye"),
        ("crash", "exit code 3"),
        ("killed", "ended its process (killed by SIGKILL; out of memory?), 2 times"),
    ],
)
def test_failed_call_masks_its_group_and_the_pool_goes_on(
    open_pool: Callable[..., RewardPool], act: str, words: str
) -> None:
    pool = open_pool("length", "act")
    outcome = pool.submit("p", [act, "b"], {}).result()
    assert outcome.valid == (False, False)
    assert outcome.rewards == (0.0, 0.0)
    [error] = outcome.errors
    assert "pool_rewards.py:act" in error
    assert words in error
    if act == "raise":
        assert "pool_rewards.py:" in error.rpartition("(")[2]
    assert pool.submit("p", ["fine", "b"], {}).result().rewards == (5.0, 2.0)


def test_a_worker_that_does_not_end_when_it_is_killed_holds_up_nobody_who_asks_what_it_used(
    open_pool: Callable[..., RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that hangs in a dead file system: the grader asks in its event loop, in which it grades, too."""
    is_ending, may_end, end = threading.Event(), threading.Event(), slot._WorkerProcess.end

    def end_late(worker: slot._WorkerProcess) -> int:
        is_ending.set()
        may_end.wait(60)
        return end(worker)

    monkeypatch.setattr(slot._WorkerProcess, "end", end_late)
    pool = open_pool("act")
    outcome = pool.submit("p", ["crash"], {})
    try:
        assert is_ending.wait(60)
        assert ThreadPoolExecutor(1).submit(pool.usage).result(timeout=20) == [None]
    finally:
        may_end.set()
    assert outcome.result(timeout=60).valid == (False,)


@pytest.mark.parametrize("act", ["stopped once", "killed once"])
def test_a_call_whose_worker_is_lost_to_somebody_else_is_made_again(
    open_pool: Callable[..., RewardPool], tmp_path: Path, act: str
) -> None:
    pool = open_pool("act", timeout_s=1.0, args={"marker": str(tmp_path / "lost")})
    pool.check()
    outcome = pool.submit("p", [act], {}).result(timeout=60)
    assert (outcome.rewards, outcome.errors) == ((1.0,), ())
    assert (tmp_path / "lost").exists()


@pytest.mark.parametrize("act", ["loop", "hold the interpreter", "stubborn"])
def test_stuck_reward_is_killed_and_replaced(open_pool: Callable[..., RewardPool], tmp_path: Path, act: str) -> None:
    marker = tmp_path / "pid"
    pool = open_pool("act", timeout_s=0.5, args={"marker": str(marker)})
    pool.check()
    stuck = pool.submit("p", [act], {})
    after = pool.submit("p", ["fine"], {})
    [error] = stuck.result(timeout=60).errors
    assert "did not return within 0.5 s" in error
    assert after.result(timeout=60).rewards == (1.0,)
    if act == "loop":
        wait_until(lambda: gone(int(marker.read_text())), "what it started is gone")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("fork, then crash", "exit code 3"),
        ("execute, then crash", "exit code 3"),
        ("start a program, then loop", "did not return within 2 s"),
    ],
)
def test_what_a_reward_started_ends_with_its_worker(
    open_pool: Callable[..., RewardPool], tmp_path: Path, act: str, words: str
) -> None:
    marker = tmp_path / "pid"
    pool = open_pool("act", timeout_s=2.0, args={"marker": str(marker)})
    pool.check()
    [error] = pool.submit("p", [act], {}).result(timeout=60).errors
    assert words in error
    wait_until(lambda: gone(int(marker.read_text())), "what it started is gone")


def test_other_workers_go_on_while_one_is_stuck(open_pool: Callable[..., RewardPool], tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    pool = open_pool("act", num_workers=2, timeout_s=300.0, args={"marker": str(marker)})
    stuck = pool.submit("p", ["loop"], {})
    wait_until(lambda: marker.exists() and marker.read_text() != "", "the reward runs")
    outcomes = [pool.submit("p", ["fine"], {}) for _ in range(20)]
    assert all(outcome.result(timeout=60).valid == (True,) for outcome in outcomes)
    with pytest.raises(TimeoutError):
        stuck.result(timeout=0)
    pool.close()
    with pytest.raises(HpcGrpoError, match="closed"):
        stuck.result(timeout=60)
    assert gone(int(marker.read_text()))


def test_idle_worker_that_dies_is_replaced(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("pid")
    for _ in range(3):
        first = int(pool.submit("p", ["a"], {}).result().rewards[0])
        os.kill(first, signal.SIGKILL)
        outcome = pool.submit("p", ["a"], {}).result()
        assert outcome.errors == ()
        assert outcome.rewards[0] not in (0.0, first)


SCRIPT = """
import pathlib, sys
if __name__ != "__main__":
    pathlib.Path(__file__).with_suffix(".imported").touch()
if __name__ == "__main__":
    from hpc_grpo.config import RewardConfig
    from hpc_grpo.grading.pool import RewardPool
    rewards = [RewardConfig(name=sys.argv[1] + ":act", timeout_s=600, args={"marker": sys.argv[2]})]
    RewardPool(rewards, num_workers=1).submit("p", ["loop"], {}).result()
"""


def test_workers_die_with_a_killed_parent_and_never_run_its_main(tmp_path: Path, file: Path) -> None:
    script, marker = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, str(script), str(file), str(marker)])
    try:
        wait_until(lambda: marker.exists() and marker.read_text() != "", "the reward runs")
        worker = int(marker.read_text())
        assert not gone(worker)
    finally:
        parent.kill()
        parent.wait()
    try:
        wait_until(lambda: gone(worker), "the worker is gone")
    except AssertionError:
        os.kill(worker, signal.SIGKILL)
        raise
    assert not script.with_suffix(".imported").exists()


def test_a_process_that_ends_without_closing_its_pool_waits_for_no_call(file: Path) -> None:
    program = f"""
from hpc_grpo.config import RewardConfig
from hpc_grpo.grading.pool import RewardPool
pool = RewardPool([RewardConfig(name="{file}:act", timeout_s=600, args={{"marker": "/dev/null"}})], num_workers=1)
pool.submit("p", ["loop"], {{}})
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
