"""The conversations of an agent's episode: matches the agent's requests to sampled tokens.

Runs in the engine's process, on its event loop. `engine/endpoint.py` calls it for each request of the agent:

    start of the request's messages                    input of the model                   trained as
    messages and answer of an earlier request          its sampled ids, and the delta       the same sequence
    the same, but already continued by another         the same                             a new sequence
    anything else: the agent rewrote the history       the messages, encoded                a new sequence

An answer is compared by its text or its tool calls; in a prompt of a text completion by its text or its ids. Text of
the agent never becomes a trained token.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from hpc_grpo.config.rollout import EnvironmentConfig
from hpc_grpo.episodes.calls import Call, before_calls, calls_of
from hpc_grpo.episodes.dialogue import Context, Conversation, Dialogue
from hpc_grpo.errors import ConfigError
from hpc_grpo.types import Completion

if TYPE_CHECKING:
    from collections.abc import Hashable

Ask = Callable[[Sequence[int], int, int], Awaitable[Completion]]
"""Samples turn N after a prompt, with at most the given number of tokens."""
_MOST_CHARACTERS = 16
"""Characters per token that a request may have. Encoding a longer one would block the engine's loop for seconds."""


class RefusedError(Exception):
    """A request cannot be answered; `code` is OpenAI's, or `episode_ended`."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Asked:
    """A request. `messages` come from `messages_of`. `is_retry`: the client may have sent it before."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    is_retry: bool = False
    prompt: str | list[int] | None = None
    """The prompt of a text completion; None for messages."""

    @property
    def key(self) -> str:
        """Return the key that a retry shares with its first request."""
        return json.dumps([self.prompt, self.messages, self.tools, self.max_tokens], ensure_ascii=False)

    @property
    def said(self) -> str | list[Any]:
        """Return the parts compared with earlier answers: the prompt, or a key of each message."""
        return [*map(_compared, self.messages)] if self.prompt is None else self.prompt


@dataclass
class Answered:
    """A request with its answer: `text`, or `calls` with the `text` before them."""

    text: str
    calls: Sequence[Call]
    completion: Completion
    prompt: Sequence[int]
    said: str | list[Any]
    """The beginning of a request that continues this one."""
    tools: Sequence[Mapping[str, Any]]
    conversation: Conversation | None
    """None: the request had a prompt instead of messages."""
    num_first: int
    """Number of tokens of the conversation's first prompt."""
    sequence: list[Completion]
    is_extended: bool = False

    @property
    def sampled(self) -> list[int]:
        ids: list[int] = self.completion.token_ids.tolist()
        return ids


class Chats:
    """The conversations of one episode, with the limits of its environment. Requests may run in parallel."""

    def __init__(self, dialogue: Dialogue, limits: EnvironmentConfig, max_prompt_tokens: int, ask: Ask) -> None:
        self.dialogue, self._limits, self._ask = dialogue, limits, ask
        self._max_prompt_tokens = max_prompt_tokens
        self._clock = asyncio.get_running_loop().time
        self._last_answer = self._clock()
        self._num_turns = self._num_open = 0
        self._answered: list[Answered] = []
        self._sequences: list[list[Completion]] = []
        self._under_way: dict[str, asyncio.Task[Answered]] = {}
        self._tasks: set[asyncio.Task[Answered]] = set()
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what the engine raised."""
        self.is_cut = False
        """Whether the last request was refused because of a limit."""

    def left_s(self) -> float:
        """Return the seconds that the agent has left to end or to get another answer."""
        waited_s = 0.0 if self._num_open else self._clock() - self._last_answer
        return self._limits.timeout_s - waited_s

    async def answer(self, asked: Asked) -> Answered:
        """Answer a request; a retry gets the earlier answer. Raises RefusedError."""
        task = self._under_way.get(asked.key) if asked.is_retry else None
        if task is None:
            task = self._under_way[asked.key] = asyncio.create_task(self._answer(asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except RefusedError:
            self.delivered(asked)
            raise

    def delivered(self, asked: Asked) -> None:
        """Note that the agent has its answer: equal messages are a new request from now on."""
        if asked.key in self._under_way and self._under_way[asked.key].done():  # else another equal request is running
            del self._under_way[asked.key]

    def turns(self, reward: float = 0.0) -> tuple[Completion, ...]:
        """Return the turns, sequence by sequence, the model's last turn at the end, with the reward."""
        turns = [turn for sequence in self._sequences for turn in sequence]
        return (*turns[:-1], *(replace(turn, reward=reward) for turn in turns[-1:]))

    async def close(self) -> None:
        """End all running requests. Return when the engine samples none of them."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _answer(self, asked: Asked) -> Answered:
        import numpy as np

        limits = self._limits
        if self._num_turns >= limits.max_turns:
            self.is_cut = True
            raise RefusedError(
                f"The episode has ended: environment.max_turns = {limits.max_turns}.", code="episode_ended"
            )
        longest = limits.max_tokens + self._max_prompt_tokens
        if (size := len(asked.key)) > _MOST_CHARACTERS * longest:  # encoding would block all other episodes
            raise self._too_long(longest, f"have {size} characters")
        before = self._before(asked)
        prompt, context, conversation = self._given(before, asked)
        num_first = len(prompt) if before is None else before.num_first
        left = limits.max_tokens - (len(prompt) - min(num_first, self._max_prompt_tokens))
        if left <= 0:
            raise self._too_long(len(prompt) + left, f"resulted in {len(prompt)} tokens")
        starts_anew = before is None or before.is_extended or context.starts_anew
        sequence: list[Completion] = [] if before is None or starts_anew else before.sequence
        if before is not None:
            before.is_extended = True
        self.is_cut = False
        self._num_turns += 1
        self._num_open += 1
        try:
            most = min(left, asked.max_tokens or left)
            completion = await self._ask(prompt, self._num_turns - 1, most)
        except Exception as error:
            # Any engine error ends the run by `broken`. The waiting agent still gets an answer.
            if not self.broken.done():
                self.broken.set_exception(error)
            raise RefusedError("The engine has failed.", 500) from error
        finally:
            self._num_open -= 1
            self._last_answer = self._clock()
        given = np.asarray(prompt if starts_anew else context.token_ids, dtype=np.int32)
        sequence.append(replace(completion, context_ids=given, starts_anew=starts_anew))
        self._sequences = [*(own for own in self._sequences if own is not sequence), sequence]
        sampled: list[int] = completion.token_ids.tolist()
        text = self.dialogue.text_of(sampled)
        calls = list(calls_of(text)) if asked.tools else []
        if any(call.error for call in calls):  # the agent reads the text
            calls = []
        own: Any = text if isinstance(asked.prompt, str) else sampled
        if asked.prompt is None:
            own = [_said(text, [(call.name, call.arguments) for call in calls])]
        said = asked.said + own
        text = before_calls(text) if calls else text
        answered = Answered(text, calls, completion, prompt, said, asked.tools, conversation, num_first, sequence)
        self._answered.append(answered)
        return answered

    def _too_long(self, most: int, told: str) -> RefusedError:
        self.is_cut = True
        return RefusedError(
            # OpenAI's words, which agents search for.
            f"This model's maximum context length is {most} tokens. However, your messages {told} "
            f"(environment.max_tokens = {self._limits.max_tokens}).",
            code="context_length_exceeded",
        )

    def _before(self, asked: Asked) -> Answered | None:
        """Return the longest request that this one continues; of two, one that no other request continues."""
        said = asked.said
        found = [
            own
            for own in self._answered
            if said[: (length := len(own.said))] == own.said
            and own.tools == asked.tools
            and said[length:]
            and all(message["role"] != "assistant" for message in asked.messages[length:])
        ]
        return max(found, key=lambda own: (len(own.said), not own.is_extended), default=None)

    def _given(self, before: Answered | None, asked: Asked) -> tuple[Sequence[int], Context, Conversation | None]:
        """Return the prompt of a request, its new part, and its conversation. Raises RefusedError."""
        given: tuple[Sequence[int], Context, Conversation | None]
        try:
            if asked.prompt is not None:
                given = (*self._written(before, asked.prompt), None)
            else:
                if before is None:
                    conversation = self.dialogue.begin(asked.messages, asked.tools)
                else:
                    conversation = copy.copy(cast(Conversation, before.conversation))
                    conversation.go_on(before.sampled, asked.messages[len(before.said) :])
                given = conversation.prompt, conversation.context, conversation
        except (ValueError, ConfigError) as error:
            raise RefusedError(str(error)) from error
        if not len(given[1].token_ids):
            raise RefusedError(f"the {'messages have' if asked.prompt is None else 'prompt has'} no token")
        return given

    def _written(self, before: Answered | None, prompt: str | list[int]) -> tuple[Sequence[int], Context]:
        """Encode the new part of a prompt. The answers at its start keep their sampled ids."""
        pieces, new = self.dialogue.pieces, prompt[0 if before is None else len(before.said) :]
        if not isinstance(new, str):
            pieces.check(new)
            ids = new
        else:
            ids = self.dialogue.encode_text(new) if before is None else pieces.encode(new)
        if before is None:
            return ids, Context(ids, starts_anew=True)
        sampled, has_end = before.sampled, isinstance(new, str) and pieces.ends(before.sampled[-1])
        if has_end and ids[:1] != sampled[-1:]:  # the agent's text has no end token there
            whole = [*before.prompt, *sampled[:-1], *ids]
            return whole, Context(whole, starts_anew=True)
        ids = ids[1:] if has_end else ids
        return [*before.prompt, *sampled, *ids], Context(ids, starts_anew=False)


def prompt_of(value: Any) -> str | list[int]:
    """Return a request's prompt: a text or token ids, or a list with one of both. Raises RefusedError."""
    [value] = value if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int) else [value]
    try:
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeEncodeError as error:
        raise RefusedError(f"prompt holds {error.object[error.start]!r}, half of a character") from error
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise RefusedError(f"prompt must be a text, or a list of token ids, not {json.dumps(value)[:100]}. Ask one by one.")


def messages_of(value: Any) -> list[Mapping[str, Any]]:
    """Return a request's messages for chat templates. Raises RefusedError for messages that no template shows."""
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise RefusedError("messages must be a list of objects, at least one")
    messages: list[Mapping[str, Any]] = [_message(message) for message in value]
    if messages[-1]["role"] == "assistant":
        raise RefusedError("the last message must not be of the role assistant: an answer is not continued")
    return messages


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise RefusedError(f"a message has the role system, developer, user, assistant or tool, not {role!r:.100}")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise RefusedError("a part of a message must be text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content or "", str):
        raise RefusedError(f"the content of a message is text, not {content!r:.100}")
    shown = {"role": "system" if role == "developer" else role, "content": content or ""}
    shown |= {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
    try:
        if calls := [_call(**call["function"], id=call.get("id")) for call in message.get("tool_calls") or ()]:
            shown["tool_calls"] = calls
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError("a tool call has function.name, and function.arguments as JSON") from error
    return shown


def _call(name: str, arguments: str, id: Any, **_: Any) -> dict[str, Any]:
    return {"id": str(id), "type": "function", "function": {"name": name, "arguments": json.loads(arguments)}}


def _compared(message: Mapping[str, Any]) -> Hashable:
    """Return the key that identifies a message. Agents strip answers, and drop text before calls."""
    if message["role"] != "assistant":
        return message["role"], message["content"]
    calls = [each["function"] for each in message.get("tool_calls", ())]
    return _said(message["content"], [(call["name"], call["arguments"]) for call in calls])


def _said(text: str, calls: Sequence[tuple[str, Any]]) -> Hashable:
    return "assistant", json.dumps([list(call) for call in calls], sort_keys=True) if calls else text.strip()
