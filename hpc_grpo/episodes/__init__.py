"""Environments: what a model acts in, turn by turn. The built-ins lie in `builtin/`; `hpc_grpo.registry` finds them.

An environment is a class of two methods:

    class GuessTheNumber:
        def reset(self, row, seed):     # -> the first message(s), or None: the prompt of the data set
            self.secret = random.Random(seed).randint(1, 8)
            return "I think of a number from 1 to 8. Guess it."

        def step(self, message):        # -> Turn
            found = str(self.secret) in message
            return Turn("Right." if found else "No.", reward=float(found), done=found)

Both may be `async`. An object of the class plays one episode after another: `reset` begins the next. `environment.args`
are keyword arguments of the class. Messages are text, a chat message (`{"role": ..., "content": ...}`), or a list of
those; text has the role `user`. An environment that shows the model tools has `tools`, a list of JSON schemas for the
chat template, once `reset` has returned.

An agent that calls the model by itself has one method in place of both (`Agent`).

This file imports nothing of the package: it is loaded by processes that run other Pythons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, Any]
Messages = str | Message | Sequence[Message]


@dataclass(frozen=True)
class Turn:
    """What an environment answers to a message of the model.

    `observation` is what the model sees next; nothing where `done`. `reward` is that of this turn. `metrics` are added
    up over the turns of an episode.
    """

    observation: Messages | None = None
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """What `environment.name` names makes."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages | None:
        """Begin an episode: the same row and seed give the same first messages."""

    def step(self, message: str) -> Turn:
        """Answer what the model wrote, without the end token."""


class Agent(Protocol):
    """What `environment.name` makes where it plays by itself. `play` may be `async`; else it has its own thread."""

    def play(self, row: Mapping[str, Any], seed: int, base_url: str, api_key: str) -> float | Turn:
        """Play one episode with the OpenAI-compatible server at `base_url`; return its reward."""


def as_messages(value: Messages | None) -> list[Message]:
    """Return chat messages. Raises ValueError for what is none.

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
    return messages
