from __future__ import annotations

import asyncio
import base64
import faulthandler
import io
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpc_grpo.config import Config
from hpc_grpo.data.tokenizer import decoder_of
from hpc_grpo.errors import ConfigError, RewardError
from hpc_grpo.grading.grader import Grader
from hpc_grpo.metrics.rollouts import MEASURES
from hpc_grpo.run.contract import ATTEMPT_DIR_VARIABLE
from hpc_grpo.run.stacks import STACKS_NAME, STACKS_SIGNAL
from hpc_grpo.types import Completion, FinishReason, GroupGrades, Prompt
from tests.support.configs import minimal_config
from tests.support.sequences import single_answers
from tests.support.tiny_vision import colour_image

PROMPT = Prompt(ordinal=7, epoch=0, token_ids=(3, 4), text="1+1=", fields={"answer": "2"})


def make_config(reward: str = "correctness", mask_truncated: bool = False) -> Config:
    return minimal_config(rewards=[{"name": reward, "weight": 2.0}], rollout={"mask_truncated": mask_truncated})


def completion(tokenizer: Any, text: str, versions: list[int], reason: FinishReason) -> Completion:
    ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] * (reason == "stop")
    assert len(ids) == len(versions)
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        engine_logprobs=np.zeros(len(ids), dtype=np.float32),
        policy_versions=np.array(versions, dtype=np.int32),
        finish_reason=reason,
    )


def grade(config: Config, tokenizer: Any, with_texts: bool = False, prompt: Prompt = PROMPT) -> GroupGrades:
    completions = (
        completion(tokenizer, " 2", [4, 4, 5], "stop"),
        completion(tokenizer, "=2", [5, 6], "length"),
        completion(tokenizer, "3", [5, 5], "stop"),
    )
    samples = single_answers(7, PROMPT.token_ids, completions)
    with closing(Grader(config, decoder_of(tokenizer))) as grader:
        return asyncio.run(grader.grade(samples, prompt, with_texts))


def test_texts_come_with_a_small_copy_of_each_image(make_tokenizer: Callable[..., Any]) -> None:
    async def images() -> tuple[bytes, ...]:  # as Ray gives what a reference stands for
        return colour_image("red", (640, 320)), colour_image("blue", (20, 30))

    grades = grade(make_config(), make_tokenizer(), True, replace(PROMPT, images=images()))
    shown = [Image.open(io.BytesIO(base64.b64decode(each))) for each in grades.thumbnails]
    assert [(each.format, each.size) for each in shown] == [("JPEG", (160, 80)), ("JPEG", (20, 30))]
    assert [max(range(3), key=each.getpixel((5, 5)).__getitem__) for each in shown] == [0, 2]  # type: ignore[union-attr]
    assert grade(make_config(), make_tokenizer(), False, replace(PROMPT, images=images())).thumbnails == ()


def test_a_reward_that_looks_at_images_gets_none_of_a_prompt_without(
    make_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    async def images() -> tuple[bytes, ...]:
        return colour_image("red"), colour_image("blue")

    (tmp_path / "own.py").write_text("def count(images, **columns):\n    return [len(own) for own in images]\n")
    config = minimal_config(rewards=[{"name": f"{tmp_path}/own.py:count"}], data={"images": "image"})
    for shown, expected in ((images(), 2.0), ((), 0.0)):
        grades = grade(config, make_tokenizer(), prompt=replace(PROMPT, images=shown))
        assert set(grades.rewards) == {expected}


def test_group_is_decoded_and_graded(make_tokenizer: Callable[..., Any]) -> None:
    grades = grade(make_config(), make_tokenizer(), with_texts=True)
    assert grades == GroupGrades(
        ordinal=7,
        rewards=(2.0, 2.0, 0.0),
        reward_parts={"correctness": (1.0, 1.0, 0.0)},
        valid=(True, True, True),
        num_completion_tokens=(3, 2, 2),
        truncated=(False, True, False),
        min_policy_versions=(4, 5, 5),
        mean_policy_versions=(pytest.approx(13 / 3), 5.5, 5.0),
        measures=grades.measures,
        texts=(" 2", "=2", "3"),
        errors=(),
        over_budget=("", "", ""),
        num_prompt_tokens=2,
        num_observed_tokens=(0, 0, 0),
        num_sequences=(1, 1, 1),
        failures=("", "", ""),
    )
    assert grades.measures.keys() == MEASURES.keys()
    assert grades.measures["tokens/completion_mean"] == (3.0, 2.0, 2.0)


def test_a_prompt_is_graded_by_the_rewards_of_its_source_alone(make_tokenizer: Callable[..., Any]) -> None:
    own = [{"name": "correctness", "weight": 3.0}, {"name": "length", "args": {"target": 2}}]
    config = minimal_config(data={"train": {"mix": [{"path": "a"}, {"path": "b", "rewards": own}]}})
    assert [[reward.name for reward in rewards] for rewards in config.reward_sets] == [
        ["correctness"],
        ["correctness", "length"],
    ]
    first = grade(config, make_tokenizer(), prompt=replace(PROMPT, reward_set=0))
    assert (list(first.reward_parts), first.rewards) == (["correctness"], (1.0, 1.0, 0.0))
    second = grade(config, make_tokenizer(), prompt=replace(PROMPT, reward_set=1))
    # One label in both sets: `reward/correctness` covers the prompts of both.
    assert list(second.reward_parts) == ["correctness", "length"]
    parts = zip(second.reward_parts["correctness"], second.reward_parts["length"], strict=True)
    assert second.rewards == tuple(3.0 * correct + length for correct, length in parts)
    assert second.reward_parts["correctness"] == (1.0, 1.0, 0.0)


def test_truncated_completions_can_be_masked(make_tokenizer: Callable[..., Any]) -> None:
    grades = grade(make_config(mask_truncated=True), make_tokenizer())
    assert grades.valid == (True, False, True)
    assert grades.rewards == (2.0, 2.0, 0.0)
    assert grades.texts == ()


def test_a_failed_reward_is_reported_with_its_prompt(make_tokenizer: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "failing.py"
    path.write_text("def f(prompts, completions): raise ValueError('judge is down')\n")
    grades = grade(make_config(f"{path}:f"), make_tokenizer())
    assert grades.valid == (False, False, False)
    [error] = grades.errors
    assert error.startswith("prompt 7, reward ")
    assert "ValueError: judge is down" in error


def test_broken_contract_and_missing_reward_raise(make_tokenizer: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "short.py"
    path.write_text("def f(prompts, completions): return []\n")
    with pytest.raises(RewardError, match="returned 0 values"):
        grade(make_config(f"{path}:f"), make_tokenizer())
    missing = closing(Grader(make_config(f"{path}:g"), decoder_of(make_tokenizer())))
    with missing as grader, pytest.raises(ConfigError, match="has no 'g'"):
        asyncio.run(grader.ready())


def test_many_groups_at_once_keep_their_own_grades(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()

    async def all_of_them(grader: Grader) -> list[GroupGrades]:
        jobs = []
        for ordinal in range(30):
            prompt = Prompt(ordinal, 0, (3,), "q", {"answer": str(ordinal)})
            text = str(ordinal + ordinal % 2)
            one = completion(tokenizer, text, [0] * len(text), "length")
            jobs.append(grader.grade(single_answers(ordinal, [3], [one]), prompt, False))
        return await asyncio.gather(*jobs)

    with closing(Grader(make_config(), decoder_of(tokenizer))) as grader:
        grades = asyncio.run(all_of_them(grader))
    assert [g.ordinal for g in grades] == list(range(30))
    assert [g.rewards[0] for g in grades] == [2.0 * (ordinal % 2 == 0) for ordinal in range(30)]


def test_a_grader_that_is_asked_writes_its_stacks(
    make_tokenizer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ATTEMPT_DIR_VARIABLE, str(tmp_path))
    grader = Grader(make_config(), decoder_of(make_tokenizer()))
    try:
        signal.raise_signal(STACKS_SIGNAL)
        (stacks,) = (tmp_path / STACKS_NAME).glob("*-grader.txt")
        assert "test_a_grader_that_is_asked" in stacks.read_text()
    finally:
        faulthandler.unregister(STACKS_SIGNAL)
        grader.close()
