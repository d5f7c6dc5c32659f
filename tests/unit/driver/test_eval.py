from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.driver.eval import Evaluation, pass_at_k
from hpc_grpo.driver.length import TrainLength
from hpc_grpo.driver.sampling import GradedGroup
from hpc_grpo.errors import RewardError
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.paths import RunDir
from hpc_grpo.types import GroupGrades, GroupRequest, Prompt
from tests.support.configs import minimal_config

NUM_SAMPLES = 3
STEP = 4


def grades(ordinal: int, *rewards: float, **changes: Any) -> GroupGrades:
    values: dict[str, Any] = {
        "ordinal": ordinal,
        "rewards": rewards,
        "reward_parts": {"correctness": rewards},
        "valid": (True,) * NUM_SAMPLES,
        "num_completion_tokens": (2, 4, 6),
        "truncated": (False,) * NUM_SAMPLES,
        "min_policy_versions": (8,) * NUM_SAMPLES,
        "mean_policy_versions": (8.0,) * NUM_SAMPLES,
        "texts": ("a", "b", "c"),
    }
    return GroupGrades(**{**values, **changes})


def failed(ordinal: int) -> GroupGrades:
    """As the grader gives them: every reward 0.0 and no rollout valid."""
    return grades(ordinal, 0.0, 0.0, 0.0, valid=(False,) * NUM_SAMPLES, errors=(f"prompt {ordinal}, sympy: timed out",))


class FakeStream:
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def prompt(self, ordinal: int) -> Prompt:
        return Prompt(ordinal, 0, (ordinal,), f"prompt {ordinal}", {"answer": "3"})


class FakePool:
    def __init__(self, answers: Sequence[GroupGrades]) -> None:
        self._answers = answers

    def start(self, prompts: Sequence[Prompt], requests: Sequence[GroupRequest], with_texts: Sequence[bool]) -> Any:
        return prompts

    def wait(self, started: Sequence[Prompt], waiting_for: str) -> list[GradedGroup]:
        return [GradedGroup(prompt, None, own) for prompt, own in zip(started, self._answers, strict=True)]

    def forget_prefixes(self) -> None:
        pass


def run_eval(folder: Path, answers: Sequence[GroupGrades], max_failed_fraction: float = 0.5) -> dict[str, float]:
    config = minimal_config(
        data={"train": {"path": "d.jsonl"}, "eval": {"path": "e.jsonl"}},
        grading={"max_failed_fraction": max_failed_fraction},
        eval={"every_steps": 2, "num_samples": NUM_SAMPLES, "pass_k": [2]},
        train={"total_steps": 6},
    )
    stream, pool = FakeStream(len(answers)), FakePool(answers)
    length = TrainLength(total_steps=6, items_per_step=4, items_per_epoch=10)
    return Evaluation(config, stream, pool, RunDir(folder), length).run(STEP)  # type: ignore[arg-type]


def test_an_eval_of_two_prompts_averages_over_them(tmp_path: Path) -> None:
    assert run_eval(tmp_path, [grades(0, 1.0, 0.0, 0.0), grades(1, 1.0, 1.0, 1.0)]) == {
        "eval/pass@1": pytest.approx((1 / 3 + 1) / 2),
        "eval/pass@2": pytest.approx((2 / 3 + 1) / 2),
        "eval/reward_mean": pytest.approx(4 / 6),
        "eval/failed_fraction": 0.0,
        "eval/tokens_mean": 4.0,
    }


def test_a_prompt_whose_reward_failed_is_left_out_and_counted(tmp_path: Path) -> None:
    """A verifier that is down says nothing about the model; as rewards of 0 it would look like a worse one."""
    whole = run_eval(tmp_path, [grades(0, 1.0, 0.0, 0.0), grades(1, 1.0, 1.0, 1.0)])
    metrics = run_eval(tmp_path, [grades(0, 1.0, 0.0, 0.0), failed(1), failed(2), grades(3, 1.0, 1.0, 1.0)])
    assert metrics == {**whole, "eval/failed_fraction": 0.5}
    lines = list(read_jsonl(RunDir(tmp_path).eval_rollouts(STEP)))
    assert [(line["reward"], line["solved"]) for line in lines[2:5]] == [(0.0, False), (None, None), (None, None)]


def test_an_eval_in_which_nothing_could_be_graded_has_no_score(tmp_path: Path) -> None:
    metrics = run_eval(tmp_path, [failed(0), failed(1)], max_failed_fraction=1.0)
    assert metrics == {"eval/failed_fraction": 1.0, "eval/tokens_mean": 4.0}
    with pytest.raises(RewardError, match="failed for 2 of 2 prompts"):
        run_eval(tmp_path, [failed(0), failed(1)])


def test_a_cut_completion_counts_even_where_training_masks_it(tmp_path: Path) -> None:
    cut = grades(0, 1.0, 0.0, 0.0, valid=(True, False, False), truncated=(False, True, True))
    metrics = run_eval(tmp_path, [cut])
    assert metrics["eval/pass@1"] == pytest.approx(1 / 3)
    assert metrics["eval/failed_fraction"] == 0.0


def test_pass_at_k_equals_enumeration() -> None:
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * c + [False] * (n - c), k))
                expected = sum(any(subset) for subset in subsets) / len(subsets)
                assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_many_samples_and_bad_arguments() -> None:
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)
    for arguments in ((4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)):
        with pytest.raises(ValueError, match="must be between"):
            pass_at_k(*arguments)


def test_an_eval_is_due_at_both_ends_and_as_often_as_the_config_says(tmp_path: Path) -> None:
    config = minimal_config(
        data={"train": {"path": "d.jsonl"}, "eval": {"path": "e.jsonl"}}, eval={"every_steps": None, "every_epochs": 2}
    )
    length = TrainLength(total_steps=12, items_per_step=4, items_per_epoch=10)  # epochs end in steps 3, 5, 8, 10
    evaluation = Evaluation(config, FakeStream(1), FakePool([]), RunDir(tmp_path), length)  # type: ignore[arg-type]
    assert [step for step in range(13) if evaluation.is_due(step)] == [0, 5, 10, 12]
