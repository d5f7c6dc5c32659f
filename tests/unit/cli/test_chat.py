from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from hpc_grpo.cli import chat as conversation
from hpc_grpo.config import Config
from tests.support.configs import minimal_config


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


def test_each_line_is_answered_by_each_model_and_a_new_conversation_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_grpo.driver.chat.Chat", FakeChat)
    import click

    @click.command()
    def command() -> Any:
        conversation.converse(minimal_config(), {"base": "m", "step_8": "e"})

    done = CliRunner().invoke(command, input="hello\n\nstop\n/new\nagain\n")
    assert done.exit_code == 0, done.output
    answers = [line for line in done.stdout.splitlines() if line]
    assert answers == [
        "[base] m 1: \\x1b[31mhello", "[step_8] e 1: \\x1b[31mhello", "[base] m 2: ", "[step_8] e 2: ",
        "[base] m 1: \\x1b[31magain", "[step_8] e 1: \\x1b[31magain",
    ]  # fmt: skip
    assert "Ctrl+D ends" in done.stderr
