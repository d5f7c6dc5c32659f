"""The conversation of `hpc-grpo sample --interactive`: prompts from the terminal, one at a time, to each model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from functools import partial
from typing import TYPE_CHECKING

from hpc_grpo.cli.options import echo

if TYPE_CHECKING:
    from hpc_grpo.config import Config
    from hpc_grpo.driver.chat import Chat

NEW = "/new"
_HELP = f"Each line is a prompt; {NEW} begins a new conversation, Ctrl+C stops an answer, Ctrl+D ends."


def converse(config: Config, models: Mapping[str, str]) -> None:
    """Answer prompts by each of `models` (name -> path) until the input ends. Raises ConfigError as `Chat` does."""
    with redirect_stdout(sys.stderr):  # libraries report there when they are imported
        chats = {name: _chat_with(config, path) for name, path in models.items()}
    echo(_HELP, err=True)
    for prompt in _prompts():
        for name, chat in chats.items():
            if prompt == NEW:
                chat.forget()
            else:
                _answer(chat, prompt, f"[{name}] " if len(chats) > 1 else "")


def _chat_with(config: Config, path: str) -> Chat:
    from hpc_grpo.driver.chat import Chat

    return Chat(config.model_copy(update={"model": config.model.model_copy(update={"path": path})}))


def _answer(chat: Chat, prompt: str, before: str) -> None:
    echo(before, nl=False)
    with suppress(KeyboardInterrupt):
        chat.say(prompt, partial(echo, nl=False))
    echo("")


def _prompts() -> Iterator[str]:
    """Yield the lines that are not empty. Ctrl+C at the prompt ends as the end of the input does."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - gives input() its editing and history
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            if prompt := input("> " if sys.stdin.isatty() else "").strip():
                yield prompt
