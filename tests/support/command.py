"""Call `hpc-grpo` as a user does, in this process."""

from __future__ import annotations

from typing import Any

import click
from click.testing import CliRunner, Result

from hpc_grpo.cli import main


def call(*words: str, **environ: str) -> Result:
    """Run `hpc-grpo WORDS`; an error becomes a message and an exit code, an unexpected exception is raised."""
    return CliRunner(env=environ).invoke(main, words, catch_exceptions=False)


def command_of(words: str) -> click.Command:
    """Return the command of some words, such as "model eval"."""
    command: click.Command | None = main
    for word in words.split():
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
        assert command is not None, words
    return command


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Parse `WORDS` of a command line: return the command's words and its parameters. Fails for no such command."""
    name = words[0]
    while (
        isinstance(command_of(name), click.Group)
        and len(name.split()) < len(words)
        and words[len(name.split())][0] != "-"
    ):
        name = f"{name} {words[len(name.split())]}"
    return name, command_of(name).make_context(name, words[len(name.split()) :]).params
