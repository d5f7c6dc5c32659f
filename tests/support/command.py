"""Call `hpc-grpo` as a user does, in this process."""

from __future__ import annotations

import click
from click.testing import CliRunner, Result

from hpc_grpo.cli import main


def call(*words: str, **environ: str) -> Result:
    """Run `hpc-grpo WORDS`; an error becomes a message and an exit code, an unexpected exception is raised."""
    return CliRunner(env=environ).invoke(main, words, catch_exceptions=False)


def command_of(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command
