from __future__ import annotations

import json
from pathlib import Path

from hpc_grpo.driver.evaluate import data_of, differences, shown_completions, shown_metrics
from hpc_grpo.metrics.evals import EvalGroup
from hpc_grpo.run.evals import EvalRequest, completions_file, new_eval_dir, read_request
from hpc_grpo.run.paths import RunDir
from tests.support.configs import minimal_config

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
    looks = {name: ({}, groups) for name, groups in zip(("base", "step_4", "step_8"), sampled, strict=True)}
    apart = differences(looks, config)
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
    file = completions_file(folder, model, "")
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
