"""Completions that use up their budget score 0, each alone: the others of the group have their true scores."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from hpc_grpo.config import RewardConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.grading.pool import RewardOutcome, RewardPool
from hpc_grpo.rewards import BuiltIn, Group
from hpc_grpo.rewards.builtin import ScoredHere
from hpc_grpo.rewards.scoring import Scored, Scorer, ScoringError
from tests.support.isolation import needs_isolation

TOWERS = [rf"\boxed{{{base}^{{{base}^{{{base}^{{{base}}}}}}}}}" for base in range(5, 35, 2)]
OBJECTS = "[" + ",".join(f'{{"a": {number}}}' for number in range(20_000)) + "]"
WISHES = {"instruction_id_list": ["detectable_content:number_placeholders"], "kwargs": [{"num_placeholders": 1}]}
DEEP = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\nprint(1)\n"


def graded(name: str, completions: list[str], row: dict[str, Any], **args: Any) -> RewardOutcome:
    """Grade one group through a worker, with the default deadline."""
    with closing(RewardPool([RewardConfig(name=name, args=args)], num_workers=1)) as pool:
        pool.check()
        return pool.submit("p", completions, row).result()


def lost(outcome: RewardOutcome) -> list[int]:
    return [index for index, reason in enumerate(outcome.over_budget) if reason]


def test_fifteen_power_towers_in_a_group_of_sixteen_cost_themselves_alone() -> None:
    outcome = graded("math", [*TOWERS, r"\boxed{\sqrt{8}}"], {"answer": r"2\sqrt{2}"}, completion_s=0.25)
    assert outcome.errors == ()
    assert outcome.valid == (True,) * 16
    assert outcome.rewards == (0.0,) * 15 + (1.0,)
    assert lost(outcome) == list(range(15))
    assert "more than 0.25 s of processor time" in outcome.over_budget[0]


@pytest.mark.parametrize(
    ("name", "completions", "row", "args", "scores"),
    [
        ("json_schema", ["1e400", "3", "4"], {"schema": {"multipleOf": 0.5}}, {}, (0.0, 1.0, 1.0)),
        ("json_schema", ["[" * 900 + "]" * 900, "[]", "1"], {"schema": {"$ref": "#/$defs/t", "$defs": {"t": {
            "type": "array", "items": {"$ref": "#/$defs/t"}}}}}, {}, (0.0, 1.0, 0.0)),
        ("json_schema", [OBJECTS, "[1]", "[1, 1]"], {"schema": {"uniqueItems": True}}, {}, (0.0, 1.0, 0.0)),
        ("regex", ["a" * 60, "ab", "b"], {"pattern": "^(a+)+b$"}, {}, (0.0, 1.0, 0.0)),
    ],
    ids=["overflow", "recursion", "unique objects", "exploding pattern"],
)  # fmt: skip
def test_a_completion_that_blows_up_its_judge_scores_0_alone(
    name: str, completions: list[str], row: dict[str, Any], args: dict[str, Any], scores: tuple[float, ...]
) -> None:
    outcome = graded(name, completions, row, **args)
    assert (outcome.errors, outcome.valid) == ((), (True,) * 3)
    assert outcome.rewards == scores
    assert lost(outcome) == [0]


@pytest.mark.parametrize(("weight", "reward"), [(2.0, 0.0), (-2.0, -2.0)])
def test_over_budget_is_never_the_best_score(weight: float, reward: float) -> None:
    rewards = [RewardConfig(name="regex", weight=weight, args={"pattern": "^(a+)+b$", "completion_s": 0.25})]
    with closing(RewardPool(rewards, num_workers=1)) as pool:
        outcome = pool.submit("p", ["a" * 60], {}).result()
    assert (outcome.rewards, lost(outcome)) == ((reward,), [0])


def test_over_budget_is_the_lowest_score_of_a_penalty(score: Callable[..., Scored]) -> None:
    assert score(blow_up, "loop", least=-1.0).scores == [-1.0]


def test_a_line_of_brackets_is_judged_in_no_time() -> None:
    outcome = graded("ifeval", ["[" * 200_000, "[name]", "[" * 200_000 + "]"], WISHES)
    assert (outcome.rewards, lost(outcome)) == ((0.0, 1.0, 1.0), [])


def test_a_title_that_never_closes_is_judged_in_no_time() -> None:
    row = {"instruction_id_list": ["detectable_format:title"], "kwargs": [{}]}
    outcome = graded("ifeval", ["<" * 200_000, "<<Joy>>"], row)
    assert (outcome.rewards, lost(outcome)) == ((0.0, 1.0), [])


@needs_isolation
def test_a_folder_3000_deep_costs_the_program_that_left_it() -> None:
    cases = [{"input": "", "output": "1"}] * 2
    outcome = graded("code", [DEEP, "print(1)", "print(1)"], {"tests": cases})
    assert (outcome.errors, outcome.valid) == ((), (True,) * 3)
    assert outcome.rewards == (1.0, 1.0, 1.0)


class Settings(ScoredHere):
    """Settings of a built-in of the test's."""


def acting(act: Callable[[str], float]) -> BuiltIn:
    def function(group: Group, settings: Settings) -> Iterator[float]:
        for completion in group.completions:
            yield act(completion)

    return BuiltIn("acting", function, Settings, None, None)


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scored]]:
    """Score by a function of the test's, in a real child."""
    scorer = Scorer()

    def scored(act: Callable[[str], float], *completions: str, timeout_s: float = 30.0, least: float = 0.0) -> Scored:
        built_in = replace(acting(act), least=least)
        monkeypatch.setattr("hpc_grpo.registry.REWARDS.find", lambda name: built_in)
        return scorer.score(built_in, Settings(completion_s=0.3), Group("p", completions, {}, timeout_s))

    yield scored
    scorer.close()


def blow_up(what: str) -> float:
    if what == "loop":
        while True:
            pass
    if what == "recursion":
        return blow_up(what)
    if what == "memory":
        return float(len(bytearray(1 << 40)))
    if what == "overflow":
        return float(10**400)
    if what == "crash":
        os._exit(3)
    if what == "abort":
        faulthandler.disable()  # pytest's
        os.abort()
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise ValueError("odd")
    if what == "sleep":
        signal.pause()
    if what == "data":
        raise ConfigError("no column")
    return 1.0


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("loop", "took more than 0.3 s of processor time"),
        ("recursion", "RecursionError"),
        ("memory", "MemoryError"),
        ("overflow", "OverflowError"),
        ("crash", "exit code 3"),
        ("abort", "killed by SIGABRT"),
        ("killed", "killed by SIGKILL"),
        ("raise", "ValueError: odd"),
        ("sleep", "did not return within 1 s"),
    ],
)
def test_whatever_ends_the_child_costs_one_completion(score: Callable[..., Scored], what: str, reason: str) -> None:
    found = score(blow_up, "fine", what, "fine", timeout_s=1.0 if what == "sleep" else 30.0)
    assert found.scores == [1.0, 0.0, 1.0]
    assert [*found.lost] == [1]
    assert reason in found.lost[1]


@pytest.mark.parametrize("what", ["loop", "recursion", "abort"])
def test_a_whole_group_may_be_over_its_budget(score: Callable[..., Scored], what: str) -> None:
    assert score(blow_up, what, what).scores == [0.0, 0.0]


@pytest.mark.parametrize(
    ("what", "words"), [("crash", "exit code 3"), ("raise", "ValueError: odd"), ("sleep", "within 1")]
)
def test_a_reward_that_fails_for_most_of_a_group_is_broken(score: Callable[..., Scored], what: str, words: str) -> None:
    with pytest.raises(ScoringError, match=words):
        score(blow_up, what, "fine", what, timeout_s=1.0)


def test_data_that_a_reward_refuses_are_no_fault_of_a_completion(score: Callable[..., Scored]) -> None:
    with pytest.raises(ConfigError, match="no column"):
        score(blow_up, "fine", "data", "fine")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_signal_from_outside_is_no_fault_of_a_completion(
    score: Callable[..., Scored], tmp_path: Any, number: int
) -> None:
    def struck_once(completion: str) -> float:
        if completion == "struck" and not (tmp_path / "struck").exists():
            (tmp_path / "struck").touch()
            os.kill(os.getpid(), number)
        return 1.0

    found = score(struck_once, "fine", "struck", timeout_s=0.5)
    assert (found.scores, found.lost) == ([1.0, 1.0], {})
    assert (tmp_path / "struck").exists()
