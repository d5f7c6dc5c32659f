from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpc_grpo.config import Config
from hpc_grpo.driver.evaluation import EvalSets, Evaluation, differences, shown_completions, shown_metrics
from hpc_grpo.driver.rollouts import GradedGroup
from hpc_grpo.driver.schedule import TrainLength
from hpc_grpo.errors import RewardError
from hpc_grpo.metrics.evals import EvalGroup
from hpc_grpo.run.evals import EvalRequest, completions_file, new_eval_dir, read_request
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.paths import RunDir
from hpc_grpo.types import GroupGrades, GroupRequest, Prompt
from tests.support.configs import minimal_config
from tests.support.sequences import graded

NUM_SAMPLES = 3
STEP = 4


def grades(ordinal: int, *rewards: float, **changes: Any) -> GroupGrades:
    told = {"reward_parts": {"correctness": rewards}, "num_completion_tokens": (2, 4, 6), "texts": ("a", "b", "c")}
    return graded(*rewards, **{"ordinal": ordinal, **told, **changes})


FAILED = grades(0, 0.0, 0.0, 0.0, valid=(False,) * NUM_SAMPLES, errors=("prompt 0, sympy: timed out",))
"""As the grader gives them: every reward 0.0 and no rollout valid."""


class FakeStream:
    def __init__(self, size: int, text: str = "prompt") -> None:
        self._size, self._text = size, text

    def __len__(self) -> int:
        return self._size

    def prompt(self, ordinal: int) -> Prompt:
        return Prompt(ordinal, 0, (ordinal,), f"{self._text} {ordinal}", {"answer": "3"}, "sums")


class FakePool:
    def __init__(self, answers: Sequence[GroupGrades]) -> None:
        self._answers, self.requests, self.num_forgotten = answers, list[GroupRequest](), 0

    def start(self, prompts: Sequence[Prompt], requests: Sequence[GroupRequest], with_texts: Sequence[bool]) -> Any:
        self.requests += requests
        return prompts

    def wait(self, started: Sequence[Prompt], waiting_for: str) -> list[GradedGroup]:
        return [GradedGroup(prompt, None, own) for prompt, own in zip(started, self._answers, strict=True)]

    def forget_prefixes(self) -> None:
        self.num_forgotten += 1


def config_of(hard: dict[str, Any] | None = None, **sections: Any) -> Config:
    """With `hard`, the config has a second eval set of that name."""
    sets = {} if hard is None else {"hard": {"path": "h.jsonl", **hard}}
    defaults = {
        "data": {"train": {"path": "d.jsonl"}, "eval": {"path": "e.jsonl"}, "eval_sets": sets},
        "eval": {"every": 2, "num_samples": NUM_SAMPLES},
        "train": {"total_steps": 6},
    }
    return minimal_config(defaults, **sections)


def run_eval(folder: Path, config: Config, answers: Sequence[GroupGrades], num_hard: int = 0) -> Evaluated:
    """Evaluate at a step, the last `num_hard` answers as those of the set `hard`."""
    streams = {"": FakeStream(len(answers) - num_hard)} | ({"hard": FakeStream(num_hard, "hard")} if num_hard else {})
    pool = FakePool(answers)
    length = TrainLength(total_steps=6, items_per_step=4, items_per_epoch=10)
    sets = EvalSets(config, streams, pool)  # type: ignore[arg-type]
    return Evaluated(pool, Evaluation(config, sets, RunDir(folder), length).run(STEP))


class Evaluated(NamedTuple):
    pool: FakePool
    metrics: dict[str, float]

    def values(self) -> dict[str, float]:
        """Return the metrics without the bounds of intervals."""
        return {name: value for name, value in self.metrics.items() if not name.endswith(("_low", "_high"))}


ONE_OF_THREE, ALL = grades(0, 1.0, 0.0, 0.0), grades(1, 1.0, 1.0, 1.0)


def test_completions_of_a_prompt_have_its_images_once(tmp_path: Path) -> None:
    run_eval(tmp_path, config_of(), [replace(ONE_OF_THREE, thumbnails=("/9j/4A==",)), ALL])
    lines = read_jsonl(RunDir(tmp_path).eval_rollouts(STEP))
    assert [line.get("images") for line in lines] == [["/9j/4A=="], *[None] * 5]


def test_an_eval_averages_over_prompts_and_leaves_out_and_counts_those_whose_reward_failed(tmp_path: Path) -> None:
    """A verifier that is down says nothing about the model; as rewards of 0 it would look like a worse one."""
    expected = {
        "eval/pass@1": pytest.approx((1 / 3 + 1) / 2),
        "eval/pass@2": pytest.approx((2 / 3 + 1) / 2),
        "eval/pass@3": 1.0,
        "eval/reward_mean": pytest.approx(4 / 6),
        "eval/failed_fraction": 0.0,
        "eval/tokens_mean": 4.0,
    }
    assert run_eval(tmp_path, config_of(), [ONE_OF_THREE, ALL]).values() == expected
    halfway = run_eval(tmp_path, config_of(grading={"max_failed_fraction": 0.5}), [ONE_OF_THREE, FAILED, FAILED, ALL])
    assert halfway.values() == {**expected, "eval/failed_fraction": 0.5}
    lines = list(read_jsonl(RunDir(tmp_path).eval_rollouts(STEP)))
    assert [(line["reward"], line["solved"]) for line in lines[2:5]] == [(0.0, False), (None, None), (None, None)]


def test_an_eval_in_which_nothing_could_be_graded_has_no_score(tmp_path: Path) -> None:
    allowed = config_of(grading={"max_failed_fraction": 1.0})
    nothing = {"eval/failed_fraction": 1.0, "eval/tokens_mean": 4.0}
    assert run_eval(tmp_path, allowed, [FAILED, FAILED]).values() == nothing
    with pytest.raises(RewardError, match="failed for 2 of 2 prompts"):
        run_eval(tmp_path, config_of(), [FAILED, FAILED])


def test_a_cut_completion_counts_even_where_training_masks_it(tmp_path: Path) -> None:
    cut = grades(0, 1.0, 0.0, 0.0, valid=(True, False, False), truncated=(False, True, True))
    metrics = run_eval(tmp_path, config_of(), [cut]).metrics
    assert (metrics["eval/pass@1"], metrics["eval/failed_fraction"]) == (pytest.approx(1 / 3), 0.0)


def test_each_eval_set_has_its_own_metrics_files_and_samples(tmp_path: Path) -> None:
    config = config_of({"num_samples": 2, "temperature": 0.5})
    two = {"valid": (True,) * 2, "num_completion_tokens": (8, 8), "texts": ("a", "b")}
    answers = [ONE_OF_THREE, grades(0, 1.0, 0.0, **two), grades(1, 0.0, 0.0, **two)]
    pool, metrics = run_eval(tmp_path, config, answers, num_hard=2)
    assert (metrics["eval/pass@1"], metrics["eval/hard/pass@1"]) == pytest.approx((1 / 3, 1 / 4))
    assert (metrics["eval/tokens_mean"], metrics["eval/hard/tokens_mean"]) == (4.0, 8.0)
    assert ("eval/pass@2" in metrics, "eval/hard/pass@2" in metrics) == (True, True)
    sampled = [(len(request.seeds), request.sampling.temperature) for request in pool.requests]
    assert sampled == [(3, 1.0), (2, 0.5), (2, 0.5)]
    run = RunDir(tmp_path)
    assert [line["prompt"] for line in read_jsonl(run.eval_rollouts(STEP))] == ["prompt 0"] * 3
    lines = [(line["prompt"], line["ordinal"], line["solved"]) for line in read_jsonl(run.eval_rollouts(STEP, "hard"))]
    assert lines == [("hard 0", 0, True), ("hard 0", 0, False), ("hard 1", 1, False), ("hard 1", 1, False)]


def test_a_set_whose_rewards_failed_ends_the_run_however_many_others_went_well(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="failed for 2 of 2 prompts"):
        run_eval(tmp_path, config_of({}), [ALL] * 3 + [FAILED] * 2, num_hard=2)


def test_an_eval_is_due_at_both_ends_and_as_often_as_the_config_says(tmp_path: Path) -> None:
    config = config_of(eval={"every": "2 epochs"})
    length = TrainLength(total_steps=12, items_per_step=4, items_per_epoch=10)  # epochs end in steps 3, 5, 8, 10
    evaluation = Evaluation(config, EvalSets(config, {}, FakePool([])), RunDir(tmp_path), length)  # type: ignore[arg-type]
    assert [step for step in range(13) if evaluation.is_due(step)] == [0, 5, 10, 12]


@pytest.mark.parametrize(("lag", "forgotten"), [(0, 1), (2, 0)])
def test_an_eval_beside_rollouts_comes_before_them_and_leaves_their_prefixes_alone(
    lag: int, forgotten: int, tmp_path: Path
) -> None:
    pool, _ = run_eval(tmp_path, config_of(rollout={"max_policy_lag": lag}), [ONE_OF_THREE, ALL])
    assert [request.is_urgent for request in pool.requests] == [lag > 0] * 2
    assert pool.num_forgotten == forgotten


@pytest.mark.parametrize(("of_eval", "expected"), [({}, [0.9, 0.5]), ({"top_p": 0.7}, [0.7, 0.5])])
def test_evals_sample_with_the_nucleus_of_training_unless_they_have_their_own(
    tmp_path: Path, of_eval: dict[str, float], expected: list[float]
) -> None:
    settings = {"every": 2, "num_samples": 3, **of_eval}
    config = config_of({"top_p": 0.5}, rollout={"top_p": 0.9}, eval=settings)
    pool, _ = run_eval(tmp_path, config, [ONE_OF_THREE] * 2, num_hard=1)
    assert [request.sampling.top_p for request in pool.requests] == expected


BOUNDS = {"eval/pass@1": 0.5, "eval/pass@1_low": 0.25, "eval/pass@1_high": 0.75, "eval/tokens_mean": 40.0}
OF_SUMS = {"eval/pass@1/sums": 1.0, "eval/failed_fraction/sums": 0.0}


def test_the_table_has_a_line_for_each_model_set_and_source() -> None:
    data = {"train": {"path": "d"}, "eval_sets": {"hard": {"path": "h", "num_samples": 4}}}
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


def test_an_episode_is_shown_turn_by_turn_with_what_it_earned(tmp_path: Path) -> None:
    folder = new_eval_dir(tmp_path / "evals")
    first, second = {"observation": "", "text": "5\n", "reward": 0.0}, {"observation": "No.", "text": "7", "reward": 1}
    file = completions_file(folder, "base")
    file.parent.mkdir(parents=True)
    line = {"ordinal": 0, "prompt": "Guess.\n", "completion": "", "reward": 1.0, "turns": [first, second]}
    file.write_text(json.dumps(line) + "\n")
    assert shown_completions(folder, EvalRequest({"base": "m"}, plays=True)) == (
        "> Guess.\n[base] 2 turns, reward 1\n[turn 1, reward 0] 5\n[environment] No.\n[turn 2, reward 1] 7"
    )


def test_each_eval_has_a_folder_of_its_own(tmp_path: Path) -> None:
    assert [new_eval_dir(tmp_path / "evals").path.name for _ in range(3)] == ["1", "2", "3"]
