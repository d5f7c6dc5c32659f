"""A conversation with a tiny model that was trained on nothing: what it is asked, not what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hpc_grpo.cli.chat import Chat, converse
from hpc_grpo.config import Config
from hpc_grpo.demo.model import ModelSize, write_model
from tests.support.configs import minimal_config

SIZE = ModelSize(hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=32, max_tokens=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, SIZE, seed=0)
    return folder


def config_of(model: Path, **data: Any) -> Config:
    asked = {"path": "prompts.jsonl", "prompt_field": "prompt", "answer_field": None}
    return minimal_config(
        model={"path": str(model), "dtype": "float32", "device": "cpu"},
        data={"eval": asked, "max_prompt_tokens": 32, **data},
        rollout={"max_new_tokens": 5},
        eval={"temperature": 0.0},
    )


def watched(chat: Chat) -> list[str]:
    """Note the texts that the model is given."""
    given: list[str] = []
    generate = chat._model.generate

    def noted(token_ids: Any, **kwargs: Any) -> Any:
        given.append(chat._tokenizer.decode(token_ids[0]))
        return generate(token_ids, **kwargs)

    chat._model.generate = noted
    return given


def test_a_chat_template_gets_the_whole_conversation_until_a_new_one_begins(model: Path) -> None:
    chat = Chat(config_of(model, system_prompt="Be brief.", prompt_format="Q: {prompt}"))
    given, shown = watched(chat), list[str]()
    first = chat.say("1+1?", shown.append)
    assert given == ["Be brief.\nQ: 1+1?\n"]
    assert "".join(shown).strip() == first
    chat.say("2+2?", shown.append)
    assert given[1] == f"Be brief.\nQ: 1+1?\n{first}\nQ: 2+2?\n"
    chat.forget()
    chat.say("3+3?", shown.append)
    assert given[2] == "Be brief.\nQ: 3+3?\n"


def test_what_does_not_fit_the_context_any_more_is_left_out_from_its_beginning(model: Path) -> None:
    chat = Chat(config_of(model))
    given = watched(chat)
    for number in range(6):
        chat.say(f"question {number}?", lambda _: None)
    assert given[0] == "question 0?\n"
    assert "question 0?" not in given[5]
    assert given[5].endswith("question 5?\n")
    assert max(map(len, given)) + 5 <= SIZE.max_tokens


def test_prompts_of_a_plain_template_stand_alone(model: Path) -> None:
    chat = Chat(config_of(model, template="plain", prompt_format="Q: {prompt}\nA:"))
    given = watched(chat)
    for prompt in ("1+1?", "2+2?"):
        chat.say(prompt, lambda _: None)
    assert given == ["Q: 1+1?\nA:", "Q: 2+2?\nA:"]


def test_it_samples_as_the_config_says(model: Path) -> None:
    config = config_of(model)
    rollout = config.rollout.model_copy(update={"min_new_tokens": 3, "top_p": 0.9})
    settings = config.eval.model_copy(update={"temperature": 0.7})
    chat = Chat(config.model_copy(update={"rollout": rollout, "eval": settings}))
    generate, asked = chat._model.generate, dict[str, Any]()
    chat._model.generate = lambda token_ids, **options: asked.update(options) or generate(token_ids, **options)
    chat.say("1+1?", lambda _: None)
    wanted = {"temperature": 0.7, "top_p": 0.9, "min_new_tokens": 3, "max_new_tokens": 5}
    assert {key: asked[key] for key in wanted} == wanted


class FakeChat:
    """Repeats what it is told, with its model's name; stops where it is told to, as on Ctrl+C."""

    def __init__(self, config: Config) -> None:
        self.name, self.turn = config.model.path, 0

    def say(self, prompt: str, show: Callable[[str], None]) -> str:
        self.turn += 1
        show(f"{self.name} {self.turn}: ")
        if prompt == "stop":
            raise KeyboardInterrupt
        show(f"\x1b[31m{prompt}")
        return prompt

    def forget(self) -> None:
        self.turn = 0


def test_each_line_is_answered_by_each_model_and_a_new_conversation_begins() -> None:
    @click.command()
    def command() -> None:
        converse(minimal_config(), {"base": "m", "step_8": "e"}, FakeChat)  # type: ignore[arg-type]

    done = CliRunner().invoke(command, input="hello\n\nstop\n/new\nagain\n")
    assert done.exit_code == 0, done.output
    answers = [line for line in done.stdout.splitlines() if line]
    assert answers == [
        "[base] m 1: \\x1b[31mhello", "[step_8] e 1: \\x1b[31mhello", "[base] m 2: ", "[step_8] e 2: ",
        "[base] m 1: \\x1b[31magain", "[step_8] e 1: \\x1b[31magain",
    ]  # fmt: skip
    assert "Ctrl+D ends" in done.stderr
