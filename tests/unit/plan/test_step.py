"""A step's tokens and the steps of a run, by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.plan.fit import make_plan
from hpc_grpo.plan.memory import GH200
from hpc_grpo.plan.model import family_model
from hpc_grpo.plan.step import num_steps, workload
from hpc_grpo.simulate.text import plan_text
from tests.support.configs import minimal_config
from tests.support.streams import loaded, write_items
from tests.unit.plan.plan_configs import plan_7b_config, planned_config


def test_tokens_of_a_step_by_hand() -> None:
    load = workload(make_plan(family_model("7B"), planned_config(train={"zero_stage": 3}), 2, GH200))
    assert load is not None
    assert load.num_sequences == 64 * 16
    assert load.max_tokens == 1024 * 4096
    assert load.max_new_tokens == 1024 * 3072
    assert load.sequences_per_engine == 11 * 16  # 64 groups of 16 for 6 engines
    assert load.num_microbatches == 256  # 512 a learner, two of 4096 tokens in each 8192


@pytest.mark.parametrize(
    ("prompts", "minibatches", "groups_of_the_fullest"), [(64, 1, 11), (8, 1, 2), (64, 8, 16), (64, 16, 16)]
)
def test_learners_get_whole_groups_of_each_minibatch(
    prompts: int, minibatches: int, groups_of_the_fullest: int
) -> None:
    """As many as the driver deals to the fullest of six learners."""
    config = planned_config(
        train={"zero_stage": 3, "num_minibatches": minibatches},
        placement={"learners_per_node": 3},
        rollout={"prompts_per_step": prompts, "group_size": 16, "max_new_tokens": 3072},
    )
    load = workload(make_plan(family_model("7B"), config, 2, GH200))
    assert load is not None
    assert load.most_trained == groups_of_the_fullest * 16
    assert load.num_microbatches == groups_of_the_fullest * 16 / 2


def test_shared_prompts_are_computed_once_a_group() -> None:
    """Groups of 16 completions of 3072 tokens, prompts of 1024: no budget holds one whole."""
    config = planned_config(train={"zero_stage": 3, "share_prompts": True})
    load = workload(make_plan(family_model("7B"), config, 2, GH200))
    assert load is not None
    assert load.learner_tokens == 64 * 1024 + 1024 * 3072
    assert load.num_microbatches == 32 * 8  # two completions after a prompt in each 8192
    larger = planned_config(train={"zero_stage": 3, "share_prompts": True, "max_tokens_per_microbatch": 110_000})
    load = workload(make_plan(family_model("7B"), larger, 2, GH200))
    assert load is not None
    assert load.num_microbatches == 16  # two groups in each


@pytest.mark.usefixtures("quick_plans")
def test_an_episode_samples_its_turns_and_is_trained_on_whole() -> None:
    played = {"name": "guess.py:G", "max_tokens": 3072, "max_turns": 4}
    rollout = {"prompts_per_step": 64, "group_size": 16, "max_new_tokens": 512}
    config = planned_config(train={"zero_stage": 3}, environment=played, rollout=rollout)
    plan = make_plan(family_model("7B"), config, 2, GH200)
    load = workload(plan)
    assert load is not None
    assert load.max_tokens == load.learner_tokens == 1024 * 4096
    assert load.max_new_tokens == 1024 * 4 * 512
    assert load.num_microbatches == 256
    text = " ".join(plan_text(plan).split())
    assert "The model writes at most 2,048 tokens of an episode, in up to 4 turns. Assumed: " in text
    assert "512 tokens on average (25% of what an episode may sample), cut at 2,048" in text


def test_the_steps_of_a_run_of_unknown_length_are_not_counted() -> None:
    assert num_steps(plan_7b_config("7B", 4, "train.total_episodes=null", "train.total_epochs=1")) is None


def test_the_epochs_of_a_file_are_counted(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    epochs = ["train.total_episodes=null", "train.total_epochs=2"]
    data = [f"data.train.path={rows}", "data.train.prompt_field=question", "data.train.answer_field=answer"]
    rows.write_text('{"question": "q", "answer": "a"}\n' * 130)
    plan = plan_7b_config("7B", 4, *epochs, *data, "rollout.prompts_per_step=64")
    assert num_steps(plan) == 5  # 260 prompts in steps of 64
    images = plan_7b_config("7B", 4, *epochs, *data, "data.images=image", "data.template=chat", "data.deduplicate=true")
    assert num_steps(images) is None  # one question about two images is two prompts
    rows.write_text("{\n")
    assert num_steps(plan) is None
    rows.write_text('{"messages": ["no message"], "answer": "a"}\n')
    assert (
        num_steps(
            plan_7b_config("7B", 4, *epochs, *data, "data.train.messages_field=messages", "data.deduplicate=true")
        )
        is None
    )


def test_epochs_are_of_what_a_run_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_tokenizer: Callable[..., Any], chat_template: str
) -> None:
    """The number is that of the streams that the run loads: without what is held out, and without duplicates."""
    monkeypatch.chdir(tmp_path)
    items = [{"question": f"What is {number % 200}?", "answer": "1"} for number in range(300)]
    write_items("a.jsonl", items)
    asked = [[{"role": "user", "content": item["question"]}] for item in items[:50]]
    write_items("b.jsonl", [{"messages": messages, "answer": "1"} for messages in asked])
    write_items("e.jsonl", items[190:195])
    sources = [{"path": "a.jsonl"}, {"path": "b.jsonl", "messages_field": "messages"}]
    for data in (
        {"train": sources[0], "held_out": 0.2},
        {"train": sources[0], "deduplicate": True},
        {"train": sources[0], "deduplicate": True, "eval": {"path": "e.jsonl"}},
        {"train": {"mix": sources}, "held_out": 0.2},
        {"train": {"mix": sources[::-1]}, "deduplicate": True, "held_out": 0.2},
    ):
        config = minimal_config(data=data, train={"total_epochs": 1}, rollout={"prompts_per_step": 1})
        plan = make_plan(family_model("7B"), config, 1, GH200)
        assert num_steps(plan) == len(loaded(config, make_tokenizer(chat_template)).train), data
