"""Token ids of a conversation: what the model wrote stays as it was sampled, and what it is told is appended as ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_grpo.data.templates import PromptStyle, Tokenizer
from hpc_grpo.episodes import Message


@dataclass(frozen=True)
class Context:
    """The token ids that go before the model's next turn, as `types.Turn` has them."""

    token_ids: Sequence[int]
    starts_anew: bool


class Dialogue:
    """The template of one source, checked against its tokenizer; makes conversations."""

    def __init__(self, tokenizer: Tokenizer, style: PromptStyle) -> None: ...

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Conversation: ...


class Conversation:
    """One episode's messages and token ids.

    `prompt` is all that the model is given for its next turn; `context` is its end, or all of it (`Context`).
    """

    prompt: Sequence[int]
    context: Context

    def text_of(self, sampled: Sequence[int]) -> str:
        """Return the text of what the model wrote, without the end token."""
        raise NotImplementedError

    def go_on(self, sampled: Sequence[int], messages: Sequence[Message]) -> Context:
        """Append what the model wrote, and what it is told then; update `prompt` and `context`, which it returns."""
        raise NotImplementedError
