"""Environments: a model acts in them, turn by turn. Built-ins are in `builtin/`; `hpc_grpo.registry` finds them.

An environment is a class with `reset` and `step`, or with `play` for an agent that calls the model itself
(docs/environments.md). An object of the class plays one episode after another; `reset` begins the next. The same row
and seed give the same first messages. An environment with tools has `tools`, a list of JSON schemas for the chat
template, after `reset` has returned.

This file imports nothing of the package, because processes with other Pythons load it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
Messages = str | Message | Sequence[Message]

OWN_METRICS = frozenset({"turns", "observed_tokens", "failed_fraction", "env_s"})
"""Names of `episode/NAME` that hpc-grpo measures itself. An environment's metric has another name."""


@dataclass(frozen=True)
class Turn:
    """The answer of an environment to a message of the model.

    `observation` is what the model sees next; ignored if `done`. `reward` is the reward of this turn. `metrics` are
    summed over the turns of an episode, and have no name of OWN_METRICS.
    """

    observation: Messages | None = None
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


def as_messages(value: Messages | None) -> list[Message]:
    """Return chat messages. Raises ValueError for other values.

    >>> as_messages("Hello")
    [{'role': 'user', 'content': 'Hello'}]
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages = [value] if isinstance(value, Mapping) else list(value)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"a message is text, or has role and content, not {message!r:.200}")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"the content of a message is text, not {message.get('content')!r:.200}")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, Sequence) or not all(
            isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls
        ):
            raise ValueError(f"the tool_calls of a message are a list with a function in each, not {calls!r:.200}")
    return messages
