"""Rewards are imported and prepared once before they are called, or refused with what is wrong."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import RewardConfig
from hpc_grpo.errors import ConfigError, RewardAwayError
from hpc_grpo.grading.pool import RewardPool
from hpc_grpo.grading.worker import CallResult, Preparation


def refusal(reward: RewardConfig, **options: Any) -> str:
    """What the check of a pool with this reward says."""
    with closing(RewardPool([reward], num_workers=1, **options)) as pool, pytest.raises(ConfigError) as caught:
        pool.check()
    return str(caught.value)


def test_slow_import_does_not_count_against_the_calls(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(1.5)\ndef f(prompts, completions): return [1.0]\n")
    with closing(RewardPool([RewardConfig(name=f"{path}:f", timeout_s=1.0)], num_workers=1)) as pool:
        assert pool.submit("p", ["a"], {}).result().errors == ()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
        ("while True: pass", "did not end within 3 s"),
        ("import os; os._exit(4)", "exit code 4"),
        ("x = 1", "has no 'f'"),
    ],
)
def test_check_finds_what_does_not_import(tmp_path: Path, source: str, words: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    assert words in refusal(RewardConfig(name=f"{path}:f"), load_timeout_s=3.0)


PREPARED = """
async def later(prompts, completions, **fields):
    return [1.0] * len(completions)

def quiet(prompts, completions, level=0):
    return [1.0]

async def ready(level=0):
    if level > 1:
        raise ValueError(f"level {level}")
    return f"level {level}"

later.prepare = ready
"""


def test_rewards_are_prepared_with_their_arguments_and_say_something(tmp_path: Path) -> None:
    path = tmp_path / "prepared.py"
    path.write_text(PREPARED)
    rewards = [RewardConfig(name=f"{path}:later", args={"level": 1}), RewardConfig(name=f"{path}:quiet")]
    with closing(RewardPool(rewards, num_workers=1)) as pool:
        assert pool.check() == (f"Reward {path}:later: level 1",)
        assert pool.submit("p", ["a"], {}).result().rewards == (2.0,)


def test_a_reward_that_cannot_be_prepared_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prepared.py"
    path.write_text(PREPARED)
    reward = RewardConfig(name=f"{path}:later", args={"level": 2})
    assert "cannot be prepared: ValueError: level 2" in refusal(reward)


AWAY = """
from hpc_grpo.errors import ConfigError, RewardAwayError

def asks(prompts, completions, **fields):
    return [1.0]

def ready(is_resume):
    raise (RewardAwayError if is_resume else ConfigError)("nobody answers")

asks.prepare = ready
"""


def test_what_is_away_at_a_resume_is_no_mistake_in_the_config(tmp_path: Path) -> None:
    path = tmp_path / "away.py"
    path.write_text(AWAY)
    with closing(RewardPool([RewardConfig(name=f"{path}:asks")], num_workers=1)) as pool:
        for is_resume, error in ((False, ConfigError), (True, RewardAwayError)):
            with pytest.raises(error, match="nobody answers"):
                pool.check(is_resume=is_resume)


def test_a_slow_import_is_a_mistake_at_the_start_and_tried_again_at_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time; time.sleep(60)")
    with closing(RewardPool([RewardConfig(name=f"{path}:f")], num_workers=1, load_timeout_s=0.5)) as pool:
        for is_resume, error in ((False, ConfigError), (True, RewardAwayError)):
            with pytest.raises(error, match=r"did not end within 0\.5 s\. Import it by hand on a compute node"):
                pool.check(is_resume=is_resume)


def test_a_preparation_that_is_late_names_its_reward(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\ndef f(prompts, completions): ...\nf.prepare = lambda: time.sleep(60)\n")
    assert f"Reward '{path}:f' did not return within 0.5 s" in refusal(
        RewardConfig(name=f"{path}:f"), load_timeout_s=0.5
    )


def test_each_reward_has_all_the_time_to_prepare_and_more_at_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RewardPool(
        [
            RewardConfig(name="regex", timeout_s=5.0),
            RewardConfig(name="remote", timeout_s=900.0, args={"url": "http://judge:8200"}),
        ],
        num_workers=1,
    )
    asked: list[tuple[str, float]] = []

    def put(call: Preparation, timeout_s: float) -> Future[CallResult]:
        asked.append((call.reward, timeout_s))
        done: Future[CallResult] = Future()
        done.set_result(CallResult(note=call.reward))
        return done

    monkeypatch.setattr(pool, "_put", put)
    try:
        assert pool.check() == ("regex", "remote")
        pool.check(is_resume=True)
    finally:
        pool.close()
    assert asked == [("regex", 120.0), ("remote", 120.0), ("regex", 720.0), ("remote", 720.0)]
