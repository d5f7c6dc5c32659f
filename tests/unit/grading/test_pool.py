"""The pool with real worker processes. Waits are for conditions; deadlines only bound a failing test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import RewardConfig
from hpc_grpo.errors import HpcGrpoError, RewardError
from hpc_grpo.grading.pool import RewardOutcome, RewardPool

REWARDS = '''
import os, pathlib, signal, subprocess, sys, time

def length(prompts, completions, **fields):
    return [float(len(c)) for c in completions]

def pid(prompts, completions):
    return [os.getpid()] * len(completions)

def echo(prompts, completions, level, scale, **fields):
    assert prompts == ["p"] * len(completions), prompts
    return [scale * one for one in level]

def act(prompts, completions, marker=None, **fields):
    what = completions[0]
    if what == "loop":
        pathlib.Path(marker).write_text(str(os.getpid()))
        while True:
            pass
    if what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    if what == "hold the interpreter":
        sum(range(10**12))
    if what == "crash":
        os._exit(3)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("stopped once", "killed once") and not pathlib.Path(marker).exists():
        pathlib.Path(marker).touch()
        os.kill(os.getpid(), signal.SIGSTOP if what.startswith("stopped") else signal.SIGKILL)
    if what == "raise":
        raise Odd("first", "second")
    if what == "exit":
        sys.exit("bye")
    if what == "print":
        print("x" * 100_000)
        print("y", file=sys.stderr)
        input_left = sys.stdin.read()
        assert input_left == "", input_left
    if what in ("fork, then crash", "execute, then crash", "start a program, then loop"):
        if what.startswith("fork"):
            child = os.fork() or time.sleep(600)
        else:
            child = subprocess.Popen(["sleep", "600"], close_fds=False).pid
        pathlib.Path(marker).write_text(str(child))
        if what.endswith("crash"):
            os._exit(3)
        time.sleep(600)
    return [1.0] * len(completions)

class Odd(Exception):
    """Cannot be unpickled: its arguments are two, its state is one."""
    def __init__(self, one, two):
        super().__init__(f"{one} {two} é")

RETURNS = {
    "nan": [float("nan"), 0.0], "inf": [0.0, float("inf")], "short": [1.0], "text": ["1", "2"],
    "none": [None, 1.0], "scalar": 1.0, "huge": [10**400, 1.0], "generator": (1.0 for _ in range(2)),
}

def returns(prompts, completions, **fields):
    return RETURNS[completions[0]]

def array(prompts, completions, **fields):
    import array
    class Scores:
        def tolist(self): return [True, 2]
    return Scores()

def heavy(prompts, completions, **fields):
    loaded = [m for m in ("torch", "ray", "vllm", "transformers", "pydantic", "numpy") if m in sys.modules]
    if loaded:
        raise AssertionError(f"heavy modules in the worker: {loaded}")
    return [1.0] * len(completions)
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pool_rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture
def open_pool(file: Path) -> Iterator[Callable[..., RewardPool]]:
    pools: list[RewardPool] = []

    def make(*functions: str, num_workers: int = 1, **options: Any) -> RewardPool:
        rewards = [RewardConfig(name=f"{file}:{function}", **options) for function in functions]
        pools.append(RewardPool(rewards, num_workers))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "the condition did not come true within 60 s"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_reward_is_the_weighted_sum_of_its_parts() -> None:
    rewards = [
        RewardConfig(name="correctness", weight=2.0),
        RewardConfig(name="keyword_match", weight=-0.5, args={"keyword_list": ["so"]}),
        RewardConfig(name="keyword_match", args={"keyword_list": ["no"]}),
    ]
    pool = RewardPool(rewards, num_workers=2)
    try:
        pool.check()
        outcome = pool.submit("1+1", ["so 2", "so 3", "2", "no"], {"answer": "#### 2", "level": 1}).result()
    finally:
        pool.close()
    assert outcome.parts == {
        "correctness": (1.0, 0.0, 1.0, 0.0),
        "keyword_match": (1.0, 1.0, 0.0, 0.0),
        "keyword_match#2": (0.0, 0.0, 0.0, 1.0),
    }
    assert outcome.rewards == (1.5, -0.5, 2.0, 1.0)
    assert outcome.valid == (True,) * 4
    assert outcome.errors == ()


def test_fields_are_lists_and_args_are_as_given(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("echo", args={"scale": 10})
    assert pool.submit("p", ["a", "b"], {"level": 3, "answer": "x"}).result().rewards == (30.0, 30.0)


def test_function_without_fields_parameter_gets_what_it_names(open_pool: Callable[..., RewardPool]) -> None:
    assert open_pool("pid").submit("p", ["a", "b"], {"level": 3}).result().valid == (True, True)


def test_a_column_that_the_function_needs_and_the_data_lack_stops_the_run(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("echo", args={"scale": 10})
    with pytest.raises(RewardError, match=r"missing a required argument: 'level'.*Columns.*answer"):
        pool.submit("p", ["a"], {"answer": "x"}).result()


def test_workers_import_nothing_heavy(open_pool: Callable[..., RewardPool]) -> None:
    outcome = open_pool("heavy").submit("p", ["a"], {}).result()
    assert outcome.errors == ()


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("nan", "returned nan for completion 0"),
        ("inf", "returned inf for completion 1"),
        ("short", "returned 1 values, [1.0]"),
        ("text", "returned '1' for completion 0"),
        ("none", "returned None for completion 0"),
        ("scalar", "returned 1.0 of type float"),
        ("huge", "for completion 0"),
        ("generator", "of type generator"),
    ],
)
def test_broken_contract_stops_the_run(open_pool: Callable[..., RewardPool], returned: str, words: str) -> None:
    pool = open_pool("returns")
    with pytest.raises(RewardError) as caught:
        pool.submit("p", [returned, "b"], {}).result()
    assert words in str(caught.value)
    assert "pool_rewards.py:returns" in str(caught.value)
    assert "must return one finite number for each of the 2 completions" in str(caught.value)
    assert caught.value.exit_code == 78


def test_array_like_results_and_booleans_are_numbers(open_pool: Callable[..., RewardPool]) -> None:
    assert open_pool("array").submit("p", ["a", "b"], {}).result().rewards == (1.0, 2.0)


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
        wait_for(lambda: not is_running(int(marker.read_text())))


def test_reward_that_prints_and_reads_is_scored(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("act")
    assert pool.submit("p", ["print", "b"], {}).result().rewards == (1.0, 1.0)


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
    wait_for(lambda: not is_running(int(marker.read_text())))


def test_large_groups_cross_whole(open_pool: Callable[..., RewardPool]) -> None:
    completions = ["x" * size for size in (1, 3_000_000, 7)]
    assert open_pool("length").submit("p", completions, {}).result().rewards == (1.0, 3_000_000.0, 7.0)


def test_other_workers_go_on_while_one_is_stuck(open_pool: Callable[..., RewardPool], tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    pool = open_pool("act", num_workers=2, timeout_s=300.0, args={"marker": str(marker)})
    stuck = pool.submit("p", ["loop"], {})
    wait_for(lambda: marker.exists() and marker.read_text() != "")
    outcomes = [pool.submit("p", ["fine"], {}) for _ in range(20)]
    assert all(outcome.result(timeout=60).valid == (True,) for outcome in outcomes)
    assert not stuck.done()
    pool.close()
    with pytest.raises(HpcGrpoError, match="closed"):
        stuck.result(timeout=60)
    assert not is_running(int(marker.read_text()))


def test_idle_worker_that_dies_is_replaced(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("pid")
    for _ in range(3):
        first = int(pool.submit("p", ["a"], {}).result().rewards[0])
        os.kill(first, signal.SIGKILL)
        outcome = pool.submit("p", ["a"], {}).result()
        assert outcome.errors == ()
        assert outcome.rewards[0] not in (0.0, first)


def test_by_no_reward_a_group_gets_nothing_and_is_valid() -> None:
    with closing(RewardPool([], num_workers=1)) as pool:
        assert pool.check() == ()
        outcome = pool.submit("p", ["a", "b"], {}).result(timeout=10)
    assert outcome == RewardOutcome((0.0, 0.0), {}, (True, True), ())


def test_a_closed_pool_refuses(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("pid")
    pool.close()
    with pytest.raises(HpcGrpoError, match="is closed"):
        pool.submit("p", ["a"], {})


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
        wait_for(lambda: marker.exists() and marker.read_text() != "")
        worker = int(marker.read_text())
        assert is_running(worker)
    finally:
        parent.kill()
        parent.wait()
    try:
        wait_for(lambda: not is_running(worker))
    except AssertionError:
        os.kill(worker, signal.SIGKILL)
        raise
    assert not script.with_suffix(".imported").exists()
