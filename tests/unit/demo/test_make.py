from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpc_grpo.demo.make import GUESSED, Addition, main, write_tasks
from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.errors import ConfigError


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def expected(question: str) -> int:
    left, right = re.findall(r"\d+", question)
    return int(left) + int(right)


def result(answer: str) -> int:
    return int(answer.rpartition("#### ")[2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    outcome = CliRunner().invoke(main, [str(folder), "--seed", "3"], catch_exceptions=False)
    assert outcome.exit_code == 0
    return folder


def test_eval_shares_no_problem_with_train_or_demonstrations(folder: Path) -> None:
    held_out = {item["question"] for item in read(folder / "eval.jsonl")}
    assert len(held_out) == 128
    for name in ("train", "sft"):
        assert held_out.isdisjoint(item["question"] for item in read(folder / f"{name}.jsonl"))


@pytest.mark.parametrize("name", ["train", "eval"])
def test_every_answer_and_every_worked_column_is_right(folder: Path, name: str) -> None:
    for item in read(folder / f"{name}.jsonl"):
        assert result(item["answer"]) == expected(item["question"])
        for sums, total in re.findall(r"([\d+]+)=(\d+)", item["answer"]):
            assert sum(map(int, sums.split("+"))) == int(total)


def test_demonstrations_are_right_some_of_the_time_and_sloppy_in_both_ways(folder: Path) -> None:
    items = read(folder / "sft.jsonl")
    right = sum(result(item["answer"]) == expected(item["question"]) for item in items) / len(items)
    guesses = sum(item["answer"].startswith("####") for item in items) / len(items)
    assert 0.35 < right < 0.55
    assert abs(guesses - GUESSED) < 0.03


def test_worked_answers_with_and_without_the_carry() -> None:
    assert Addition(37, 48).answer == "7+8=15 3+4+1=8 #### 85"
    assert Addition(95, 82).answer == "5+2=7 9+8=17 #### 177"
    never_guessing = Addition(37, 48).sloppy_answer(random.Random(0), guessed=0.0, carry_forgotten=1.0)
    assert never_guessing == "7+8=15 3+4=7 #### 75"


def test_same_seed_same_bytes_other_seed_other_problems(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_tasks(tmp_path / name, num_train=20, num_eval=5, num_sft=20, seed=seed)
    for file in ("train.jsonl", "eval.jsonl", "sft.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        assert (tmp_path / "a" / file).read_bytes() != (tmp_path / "c" / file).read_bytes()


def test_more_problems_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="8100"):
        write_tasks(tmp_path, num_train=8000, num_eval=101, num_sft=0, seed=0)


def test_model_folder_loads_and_its_tokenizer_keeps_every_character(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert 300_000 < model.num_parameters() < 1_000_000
    assert model.config.eos_token_id == tokenizer.eos_token_id
    for item in read(folder / "sft.jsonl")[:50]:
        text = f"{item['question']}\n{item['answer']}"
        token_ids = tokenizer(text).input_ids
        assert len(token_ids) == len(text)
        assert tokenizer.decode(token_ids) == text
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_longest_worked_answer_fits_the_shipped_config() -> None:
    from hpc_grpo.config import load_config

    longest = max(len(Addition(left, right).answer) for left in range(10, 100) for right in range(10, 100))
    config = load_config("local/tiny_grpo")
    assert longest + 1 <= config.rollout.max_new_tokens
    assert len("What is 99+99?\n") <= config.data.max_prompt_tokens


def test_untied_model_has_an_output_layer_of_its_own(tmp_path: Path) -> None:
    tied = write_model(tmp_path / "tied", ModelSize(num_layers=1), seed=0)
    untied = write_model(tmp_path / "untied", ModelSize(num_layers=1, tie_embeddings=False), seed=0)
    assert untied - tied == 258 * 128


def test_head_size_without_a_kernel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="heads of 16"):
        write_model(tmp_path, ModelSize(hidden_size=64, num_heads=4), seed=0)
