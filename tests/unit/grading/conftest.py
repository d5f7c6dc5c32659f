"""Rewards that behave in every way a user's may, and pools of real worker processes that have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import RewardConfig
from hpc_grpo.grading.pool import RewardPool

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

def scalars(prompts, completions, **fields):
    import numpy
    return [numpy.True_, numpy.array(0.5)]

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
