from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import Config, with_overrides
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.evals import config_of_model, eval_config, sample_config
from hpc_grpo.run.paths import RunDir, tokenized_data
from tests.support.configs import minimal_config

FOLDER = RunDir(Path("/runs/r/evals/3"))
HELD_OUT = {"train": {"path": "d.jsonl"}, "held_out": 0.1}


def config_of(**sections: Any) -> Config:
    defaults = {
        "run": {"name": "r", "root": "/runs", "seed": 7},
        "data": {"train": {"path": "d.jsonl"}, "eval": {"path": "e.jsonl"}},
        "rollout": {"temperature": 0.7},
        "engine": {"engines_per_node": 2},
    }
    return minimal_config(defaults, **sections)


def test_the_config_of_an_eval_samples_as_the_run_does_from_another_model_and_folder() -> None:
    before = config_of(eval={"num_samples": 4, "every": "2 epochs"}, launch={"notify": ["mail"]})
    config = eval_config(before, FOLDER, "/exports/step_8")
    assert (config.model.path, config.run_path, config.run.seed) == ("/exports/step_8", FOLDER.path, 7)
    assert (config.engine, config.rollout, config.eval.num_samples) == (before.engine, before.rollout, 4)
    assert config.data.eval == before.data.eval
    assert config.data.train.path == "e.jsonl"  # training data are not read
    assert tokenized_data(config) == tokenized_data(before)
    assert config.launch.notify == []


def test_what_training_asks_for_does_not_stand_in_the_way_of_longer_completions() -> None:
    config = eval_config(config_of(train={"max_tokens_per_microbatch": 800}), FOLDER, "m")
    assert with_overrides(config, ["rollout.max_new_tokens=4096"]).max_model_len == 512 + 4096


def test_held_out_prompts_need_the_data_that_they_are_held_out_of() -> None:
    config = eval_config(minimal_config(data=HELD_OUT), FOLDER, "m")
    assert (config.data.train.path, config.data.held_out is not None) == ("d.jsonl", True)


def test_data_of_ones_own_take_the_place_of_the_runs_with_the_columns_and_the_template_of_training() -> None:
    train = {"path": "d.jsonl", "prompt_field": "problem", "system_prompt": "Think.", "max_items": 3}
    before = config_of(data={"train": train, "held_out": 0.1, "eval": None})
    config = eval_config(before, FOLDER, "m", [{"path": "a.jsonl"}, {"path": "b.jsonl", "prompt_field": "text"}])
    assert config.data.held_out is None
    sources = [source for _, source in config.data.sources(for_eval=True)]
    assert [(source.path, source.prompt_field, source.system_prompt, source.max_items) for source in sources] == [
        ("a.jsonl", "problem", "Think.", None),
        ("b.jsonl", "text", "Think.", None),
    ]


def test_rewards_of_training_sources_alone_are_not_asked_for() -> None:
    train = {"mix": [{"path": "d.jsonl", "rewards": [{"name": "llm_judge"}]}, {"path": "c.jsonl"}]}
    config = eval_config(config_of(data={"train": train, "eval": {"path": "e.jsonl"}}), FOLDER, "m")
    assert [reward.name for reward in config.all_rewards] == ["correctness"]


def test_a_run_that_never_evaluated_is_judged_by_its_first_reward_and_one_of_sft_samples_all_the_same() -> None:
    config = eval_config(config_of(rewards=[{"name": "regex"}], task="sft"), FOLDER, "m")
    assert ([reward.name for reward in config.all_rewards], config.eval.reward, config.task.name) == (
        ["regex"],
        None,
        "grpo",
    )
    assert with_overrides(config, ["eval.num_samples=2"]).needs.rollouts


def test_an_eval_asks_for_no_reward_teacher_or_minibatch_of_training() -> None:
    distilled = config_of(task={"name": "distill", "args": {"teacher": "org/large"}}, rewards=[])
    for config in (eval_config(distilled, FOLDER, "m"), sample_config(distilled, FOLDER, "m", "p.jsonl", None)):
        assert (config.needs.teacher, config.task_args.teacher) == (False, None)
    assert [reward.name for reward in eval_config(distilled, FOLDER, "m").all_rewards] == ["correctness"]
    tuned = config_of(task="sft", rewards=[], train={"num_minibatches": 100_000})
    assert with_overrides(eval_config(tuned, FOLDER, "m"), ["rollout.top_p=0.9"]).rollout.top_p == 0.9


def test_what_is_solved_is_decided_as_in_training_where_sources_have_rewards_of_their_own() -> None:
    own = {"rewards": [{"name": "length"}, {"name": "gsm8k"}]}
    data = {"train": {"path": "d.jsonl", **own}, "eval": {"path": "e.jsonl", **own}}
    before = config_of(data=data, eval={"reward": "gsm8k", "every": 1})
    assert eval_config(before, FOLDER, "m").eval.reward == "gsm8k"


def test_without_an_eval_set_data_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"no eval set .* --data PATH"):
        eval_config(minimal_config(), FOLDER, "m")


def test_prompts_of_a_sample_get_the_template_of_the_source_and_no_judgement() -> None:
    mix = [{"path": "a.jsonl", "name": "sums", "rewards": [{"name": "math"}]}, {"path": "b", "system_prompt": "Hi."}]
    before = config_of(data={"train": {"mix": mix}, "eval": {"path": "e.jsonl"}})
    config = sample_config(before, FOLDER, "m", "/prompts.jsonl", "data.train.mix.1")
    ((_, source),) = config.data.sources(for_eval=True)
    assert (source.path, source.prompt_field, source.answer_field, source.system_prompt) == (
        "/prompts.jsonl", "prompt", None, "Hi."
    )  # fmt: skip
    assert [reward.name for reward in config.all_rewards] == ["length"]
    assert (config.eval.temperature, config.eval.num_samples) == (0.7, 1)
    tuned = with_overrides(before, ["rollout.top_p=0.9", "eval.top_p=0.5", "loss.correction=none"])
    assert sample_config(tuned, FOLDER, "m", "p", None).eval.top_p == 0.9
    assert sample_config(before, FOLDER, "m", "p", None).data.eval.system_prompt is None  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"--source = 'sum' must be .*: sums, data.train.mix.1"):
        sample_config(before, FOLDER, "m", "p", "sum")


def test_a_model_alone_has_defaults_and_one_engine() -> None:
    config = eval_config(config_of_model("m", "d.jsonl"), FOLDER, "m", [{"path": "d.jsonl"}])
    assert config.engine.engines_per_node == 1
    assert with_overrides(config, ["eval.num_samples=2"]).eval.num_samples == 2


def test_a_held_out_share_is_told_as_the_data_that_it_was_taken_from() -> None:
    data = {"train": {"path": "t.jsonl"}, "held_out": 0.1, "eval_sets": {"hard": {"path": "h.jsonl"}}}
    assert [source.path for _, source in minimal_config(data=data).data.judged_sources] == ["t.jsonl", "h.jsonl"]
    assert [source.path for _, source in config_of().data.judged_sources] == ["e.jsonl"]
