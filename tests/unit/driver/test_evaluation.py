from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import Config
from hpc_grpo.driver.evaluation import EvalSets, Evaluation, data_of, differences, shown_completions, shown_metrics
from hpc_grpo.driver.length import TrainLength
from hpc_grpo.driver.sampling import GradedGroup
from hpc_grpo.errors import RewardError
from hpc_grpo.metrics.evals import EvalGroup
from hpc_grpo.run.evals import EvalRequest, completions_file, new_eval_dir, read_request
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
    def __init__(self, size: int, text: str = "prompt") -> None:
        self._size = size
        self._text = text

    def __len__(self) -> int:
        return self._size

    def prompt(self, ordinal: int) -> Prompt:
        return Prompt(ordinal, 0, (ordinal,), f"{self._text} {ordinal}", {"answer": "3"}, "sums")


class FakePool:
    def __init__(self, answers: Sequence[GroupGrades]) -> None:
        self._answers = answers
        self.requests: list[GroupRequest] = []
        self.num_forgotten = 0

    def start(self, prompts: Sequence[Prompt], requests: Sequence[GroupRequest], with_texts: Sequence[bool]) -> Any:
        self.requests += requests
        return prompts

    def wait(self, started: Sequence[Prompt], waiting_for: str) -> list[GradedGroup]:
        return [GradedGroup(prompt, None, own) for prompt, own in zip(started, self._answers, strict=True)]

    def forget_prefixes(self) -> None:
        self.num_forgotten += 1


def config_of(**sections: Any) -> Config:
    return minimal_config(
        {
            "data": {"train": {"path": "d.jsonl"}, "eval": {"path": "e.jsonl"}},
            "eval": {"every_steps": 2, "num_samples": NUM_SAMPLES, "pass_k": [2]},
            "train": {"total_steps": 6},
        },
        **sections,
    )


def evaluation_of(config: Config, streams: dict[str, FakeStream], pool: FakePool, folder: Path) -> Evaluation:
    length = TrainLength(total_steps=6, items_per_step=4, items_per_epoch=10)
    sets = EvalSets(config, streams, pool)  # type: ignore[arg-type]
    return Evaluation(config, sets, RunDir(folder), length)


def run_eval(folder: Path, answers: Sequence[GroupGrades], max_failed_fraction: float = 0.5) -> dict[str, float]:
    """The metrics of an eval, without the bounds of intervals."""
    config = config_of(grading={"max_failed_fraction": max_failed_fraction})
    metrics = evaluation_of(config, {"": FakeStream(len(answers))}, FakePool(answers), folder).run(STEP)
    return {name: value for name, value in metrics.items() if not name.endswith(("_low", "_high"))}


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


def test_each_eval_set_has_its_own_metrics_files_and_samples(tmp_path: Path) -> None:
    hard = {"path": "h.jsonl", "num_samples": 2, "pass_k": [1], "temperature": 0.5}
    data = {"train": {"path": "d.jsonl"}, "eval": {"path": "e.jsonl"}, "eval_sets": {"hard": hard}}
    two = {"valid": (True,) * 2, "num_completion_tokens": (8, 8), "texts": ("a", "b")}
    pool = FakePool([grades(0, 1.0, 0.0, 0.0), grades(0, 1.0, 0.0, **two), grades(1, 0.0, 0.0, **two)])
    streams = {"": FakeStream(1), "hard": FakeStream(2, "hard prompt")}
    metrics = evaluation_of(config_of(data=data), streams, pool, tmp_path).run(STEP)
    assert (metrics["eval/pass@1"], metrics["eval/hard/pass@1"]) == pytest.approx((1 / 3, 1 / 4))
    assert (metrics["eval/tokens_mean"], metrics["eval/hard/tokens_mean"]) == (4.0, 8.0)
    assert ("eval/pass@2" in metrics, "eval/hard/pass@2" in metrics) == (True, False)
    assert [(len(request.seeds), request.sampling.temperature) for request in pool.requests] == [
        (3, 1.0), (2, 0.5), (2, 0.5)
    ]  # fmt: skip
    run = RunDir(tmp_path)
    assert [line["prompt"] for line in read_jsonl(run.eval_rollouts(STEP))] == ["prompt 0"] * 3
    lines = [(line["prompt"], line["ordinal"], line["solved"]) for line in read_jsonl(run.eval_rollouts(STEP, "hard"))]
    first, second = "hard prompt 0", "hard prompt 1"
    assert lines == [(first, 0, True), (first, 0, False), (second, 1, False), (second, 1, False)]


def test_a_set_whose_rewards_failed_ends_the_run_however_many_others_went_well(tmp_path: Path) -> None:
    streams = {"": FakeStream(3), "hard": FakeStream(2)}
    data = {"train": {"path": "d.jsonl"}, "eval": {"path": "e.jsonl"}, "eval_sets": {"hard": {"path": "h.jsonl"}}}
    pool = FakePool([grades(ordinal, 1.0, 0.0, 0.0) for ordinal in range(3)] + [failed(0), failed(1)])
    with pytest.raises(RewardError, match="failed for 2 of 2 prompts"):
        evaluation_of(config_of(data=data), streams, pool, tmp_path).run(STEP)


def test_an_eval_is_due_at_both_ends_and_as_often_as_the_config_says(tmp_path: Path) -> None:
    config = minimal_config(
        data={"train": {"path": "d.jsonl"}, "eval": {"path": "e.jsonl"}}, eval={"every_steps": None, "every_epochs": 2}
    )
    length = TrainLength(total_steps=12, items_per_step=4, items_per_epoch=10)  # epochs end in steps 3, 5, 8, 10
    evaluation = Evaluation(config, EvalSets(config, {}, FakePool([])), RunDir(tmp_path), length)  # type: ignore[arg-type]
    assert [step for step in range(13) if evaluation.is_due(step)] == [0, 5, 10, 12]


@pytest.mark.parametrize(("lag", "forgotten"), [(0, 1), (2, 0)])
def test_an_eval_beside_rollouts_comes_before_them_and_leaves_their_prefixes_alone(
    lag: int, forgotten: int, tmp_path: Path
) -> None:
    pool = FakePool([grades(0, 1.0, 0.0, 0.0), grades(1, 1.0, 1.0, 1.0)])
    config = config_of(rollout={"max_policy_lag": lag})
    evaluation_of(config, {"": FakeStream(2)}, pool, tmp_path).run(STEP)
    assert [request.is_urgent for request in pool.requests] == [lag > 0] * 2
    assert pool.num_forgotten == forgotten


def test_evals_sample_with_the_nucleus_of_training_unless_they_have_their_own(tmp_path: Path) -> None:
    def sampled(**of_eval: Any) -> list[float]:
        hard = {"path": "h.jsonl", "top_p": 0.5}
        data = {"train": {"path": "d.jsonl"}, "eval": {"path": "e.jsonl"}, "eval_sets": {"hard": hard}}
        config = config_of(data=data, rollout={"top_p": 0.9}, eval={"every_steps": 2, "num_samples": 3, **of_eval})
        pool = FakePool([grades(0, 1.0, 0.0, 0.0)] * 2)
        evaluation_of(config, {"": FakeStream(1), "hard": FakeStream(1)}, pool, tmp_path).run(STEP)
        return [request.sampling.top_p for request in pool.requests]

    assert sampled() == [0.9, 0.5]
    assert sampled(top_p=0.7) == [0.7, 0.5]


BOUNDS = {"eval/pass@1": 0.5, "eval/pass@1_low": 0.25, "eval/pass@1_high": 0.75, "eval/tokens_mean": 40.0}
OF_SUMS = {"eval/pass@1/sums": 1.0, "eval/failed_fraction/sums": 0.0}


def test_the_table_has_a_line_for_each_model_set_and_source() -> None:
    data = {"train": {"path": "d"}, "eval_sets": {"hard": {"path": "h", "pass_k": [4], "num_samples": 4}}}
    metrics = {**BOUNDS, **OF_SUMS, "eval/hard/pass@4": 0.125}
    sources = {"": ["gcd", "sums"], "hard": ["h"]}
    lines = shown_metrics({"base": metrics, "step_8": BOUNDS}, sources, minimal_config(data=data)).splitlines()
    assert [line.split() for line in lines] == [
        ["MODEL", "DATA", "PASS@1", "PASS@4", "REWARD", "TOKENS", "FAILED_FRACTION"],
        ["base", "all", "0.500", "[0.250,", "0.750]", "-", "-", "40.0", "-"],
        ["base", "gcd", "-", "-", "-", "-", "-"],
        ["base", "sums", "1.000", "-", "-", "-", "0.000"],
        ["base", "hard", "-", "0.125", "-", "-", "-"],
        ["step_8", "all", "0.500", "[0.250,", "0.750]", "-", "-", "40.0", "-"],
        *([["step_8", name, "-", "-", "-", "-", "-"] for name in ("gcd", "sums", "hard")]),
    ]


def test_each_model_has_its_difference_from_the_first_by_set() -> None:
    def asked(right: int) -> EvalGroup:
        return EvalGroup("1+1?", "d", {"answer": "2"}, ("2",), (float(right),), (bool(right),), (3,))

    config = minimal_config(data={"eval": {"path": "d"}, "eval_sets": {"hard": {"path": "h"}}})
    sampled = [{"": [asked(own), asked(1)], "hard": [asked(own)]} for own in (0, 1, 0)]
    apart = differences(dict(zip(("base", "step_4", "step_8"), sampled, strict=True)), config)
    assert {name: own["eval/pass@1"] for name, own in apart.items()} == {"step_4 - base": 0.5, "step_8 - base": 0.0}
    assert apart["step_4 - base"]["eval/hard/reward_mean"] == 1.0
    shown = shown_metrics(apart, {"": ["d"], "hard": ["h"]}, config, of="DIFFERENCE").splitlines()
    assert shown[0].split() == ["DIFFERENCE", "DATA", "PASS@1", "REWARD", "TOKENS"]
    assert shown[1].split()[:5] == ["step_4", "-", "base", "all", "0.500"]


def test_a_held_out_share_is_told_as_the_data_that_it_was_taken_from() -> None:
    data = {"train": {"path": "t.jsonl"}, "held_out": {"fraction": 0.1}, "eval_sets": {"hard": {"path": "h.jsonl"}}}
    assert data_of(minimal_config(data=data)) == ["t.jsonl", "h.jsonl"]
    assert data_of(minimal_config(data={"eval": {"path": "e.jsonl"}})) == ["e.jsonl"]


def write_completions(folder: RunDir, model: str, *lines: tuple[int, str]) -> None:
    file = completions_file(folder, model)
    file.parent.mkdir(parents=True)
    described = ({"ordinal": ordinal, "completion": text} for ordinal, text in lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in described))


def test_one_completion_is_shown_bare_and_several_by_prompt_and_model(tmp_path: Path) -> None:
    folder = new_eval_dir(tmp_path / "evals")
    prompts = ("7*8?", "2+2?")
    EvalRequest({"base": "m", "step_8": "e"}, prompts).save(folder)
    write_completions(folder, "base", (0, " 54\n"), (1, "5"))
    assert shown_completions(folder, EvalRequest({"base": "m"}, prompts)) == "> 7*8?\n[base] 54\n\n> 2+2?\n[base] 5"
    write_completions(folder, "step_8", (0, "56"))
    assert shown_completions(folder, EvalRequest({"step_8": "e"}, prompts[:1])) == "56"
    assert shown_completions(folder, read_request(folder)).startswith("> 7*8?\n[base] 54\n[step_8] 56")


def test_each_eval_has_a_folder_of_its_own(tmp_path: Path) -> None:
    assert [new_eval_dir(tmp_path / "evals").path.name for _ in range(3)] == ["1", "2", "3"]
