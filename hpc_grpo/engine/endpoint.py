"""An OpenAI-compatible server of chat and text completions, in the engine's process. Agents sample through it.

It listens on the loopback of its node, where the agents run. A request's API key identifies its episode. vLLM's own
routes cannot be used: here a request's text is matched to the token ids that were sampled. aiohttp comes with vLLM.

    start of the request's messages                    input of the model                   trained as
    messages and answer of an earlier request          its sampled ids, and the delta       the same sequence
    the same, but already continued by another         the same                             a new sequence
    anything else: the agent rewrote the history       the messages, encoded                a new sequence

Answers are compared by text or tool calls, in text completions by text or ids. Agents' text is not trained.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from hpc_grpo.config.rollout import EnvironmentConfig
from hpc_grpo.data.templates import as_text
from hpc_grpo.episodes import Message
from hpc_grpo.episodes.calls import arguments_of, before_calls, calls_of
from hpc_grpo.episodes.dialogue import Conversation, Dialogue, WrittenText
from hpc_grpo.errors import ConfigError
from hpc_grpo.types import Completion

Ask = Callable[[Sequence[int], int, int], Awaitable[Completion]]
"""Called with a prompt, the turn's number and the most tokens to sample. Returns the sampled completion."""
_MAX_BODY_BYTES = 16 << 20
_MOST_CHARACTERS = 16
"""Limit of a request's characters per allowed token. Encoding more would block the engine's loop for seconds."""
_COMMON = ("logprobs", "stream", "stream_options")
_TAKEN = {
    "/v1/chat/completions": ("messages", "tools", "max_tokens", "max_completion_tokens", *_COMMON),
    "/v1/completions": ("prompt", "max_tokens", *_COMMON),
}
"""The accepted fields of each route."""
_IGNORED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("model", "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
)
"""Ignored fields. First line: training uses the run's own sampling. Second line: they do not change the answer."""
_DEFAULTS: dict[str, Any] = {
    "n": 1, "best_of": 1, "stop": [], "echo": False, "suffix": "", "logit_bias": {}, "top_logprobs": 0,
    "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}, "modalities": ["text"],
}  # fmt: skip
"""Fields that may only have this value."""
_INSTEAD = {
    "n": "Ask n times.",
    "stop": "End answers by rollout.stop of the config.",
    "stop_token_ids": "End answers by rollout.stop of the config.",
    "min_tokens": "Use rollout.min_new_tokens of the config.",
    "chat_template_kwargs": "Use data.template_args of the config.",
}


class RefusedError(Exception):
    """A request cannot be answered; `code` is OpenAI's, or `episode_ended`."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Request:
    """A request. `given` are messages in the form for chat templates, or the prompt of a text completion, text or ids.

    `max_tokens`: the client's limit, or None. `is_retry`: the client may have sent the same request before.
    """

    given: Any
    is_chat: bool
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    is_retry: bool = False

    @property
    def key(self) -> str:
        """Return the key that a retry shares with its first request."""
        return json.dumps([self.given, self.tools, self.max_tokens], ensure_ascii=False)

    @property
    def said(self) -> Any:
        """Return what is matched with earlier answers: the prompt, or one key for each message."""
        return [*map(_key, self.given)] if self.is_chat else self.given


@dataclass
class Answered:
    """A request with its answer, a message in OpenAI's form.

    A later request that begins with `said` continues this one. `is_extended`: another request already continues it.
    """

    message: Message
    completion: Completion
    asked: Request
    said: Any
    conversation: Conversation | WrittenText
    sequence: list[Completion]
    is_extended: bool = False


class Chats:
    """The conversations of one episode, with the limits of its environment. Requests may run in parallel."""

    def __init__(self, dialogue: Dialogue, limits: EnvironmentConfig, max_prompt_tokens: int, ask: Ask) -> None:
        self.dialogue, self._limits, self._ask = dialogue, limits, ask
        self._max_prompt_tokens = max_prompt_tokens
        self._clock = asyncio.get_running_loop().time
        self._last_answer = self._clock()
        self._num_turns = self._num_open = 0
        self._answered: list[Answered] = []
        self._under_way: dict[str, asyncio.Task[Answered]] = {}
        self._tasks: set[asyncio.Task[Answered]] = set()
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the error of the engine; never gets a result."""
        self.is_cut = False
        """True if the last request was refused because of a limit."""

    def left_s(self) -> float:
        """Return the seconds that the agent has left to end or to send a request. A running request stops the clock."""
        return self._limits.timeout_s - (0.0 if self._num_open else self._clock() - self._last_answer)

    async def answer(self, asked: Request) -> Answered:
        """Answer a request; a retry gets the answer of its first request. Raises RefusedError."""
        task = self._under_way.get(asked.key) if asked.is_retry else None
        if task is None:
            task = self._under_way[asked.key] = asyncio.create_task(self._answer(asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    def delivered(self, asked: Request) -> None:
        """Note that the agent has its answer: from now on an equal request is a new request, not a retry."""
        if asked.key in self._under_way and self._under_way[asked.key].done():  # else another equal request is running
            del self._under_way[asked.key]

    def turns(self, reward: float = 0.0) -> tuple[Completion, ...]:
        """Return the turns, sequence by sequence. The model's last turn is at the end and gets the `reward`."""
        latest_first = {id(own.sequence): own.sequence for own in reversed(self._answered)}
        turns = [turn for sequence in reversed(latest_first.values()) for turn in sequence]
        return (*turns[:-1], *(replace(turn, reward=reward) for turn in turns[-1:]))

    async def close(self) -> None:
        """Cancel all running requests. Return when the engine no longer samples any of them."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _answer(self, asked: Request) -> Answered:
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
        conversation = self._conversation(before, asked)
        prompt = conversation.prompt
        left = limits.max_tokens - (len(prompt) - min(conversation.num_first, self._max_prompt_tokens))
        if left <= 0:
            raise self._too_long(len(prompt) + left, f"resulted in {len(prompt)} tokens")
        starts_anew = before is None or before.is_extended or conversation.starts_anew
        sequence: list[Completion] = [] if before is None or starts_anew else before.sequence
        if before is not None:
            before.is_extended = True
        self.is_cut = False
        self._num_turns += 1
        self._num_open += 1
        try:
            completion = await self._ask(prompt, self._num_turns - 1, min(left, asked.max_tokens or left))
        except RefusedError:
            raise
        except Exception as error:
            # `broken` passes any engine error to the episode, which raises it. The waiting agent still gets an answer.
            if not self.broken.done():
                self.broken.set_exception(error)
            raise RefusedError("The engine has failed.", 500) from error
        finally:
            self._num_open -= 1
            self._last_answer = self._clock()
        sampled: list[int] = completion.token_ids.tolist()
        text = self.dialogue.text_of(sampled)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        calls = list(calls_of(text)) if asked.tools else []
        if calls and not any(call.error for call in calls):  # after a wrong call, the agent gets the text
            message["content"] = before_calls(text).strip() or None
            functions = ((call.name, json.dumps(arguments_of(call, asked.tools))) for call in calls)
            message["tool_calls"] = [
                {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": {"name": name, "arguments": own}}
                for name, own in functions
            ]
        own: Any = [_key(_shown(message))] if asked.is_chat else text if isinstance(asked.given, str) else sampled
        given = np.asarray(prompt if starts_anew else conversation.context_ids, dtype=np.int32)
        sequence.append(completion.as_turn(given, starts_anew=starts_anew))
        self._answered.append(Answered(message, completion, asked, asked.said + own, conversation, sequence))
        return self._answered[-1]

    def _too_long(self, most: int, told: str) -> RefusedError:
        self.is_cut = True
        return RefusedError(
            # OpenAI's words, which agents search for.
            f"This model's maximum context length is {most} tokens. However, your messages {told} "
            f"(environment.max_tokens = {self._limits.max_tokens}).",
            code="context_length_exceeded",
        )

    def _before(self, asked: Request) -> Answered | None:
        """Return the longest earlier request that `asked` continues; None if there is none.

        Of equally long requests, prefers one that no other request continues.
        """
        said = asked.said
        found = [
            own
            for own in self._answered
            if said[: (length := len(own.said))] == own.said
            and own.asked.tools == asked.tools
            and said[length:]
            and not (asked.is_chat and any(message["role"] == "assistant" for message in asked.given[length:]))
        ]
        return max(found, key=lambda own: (len(own.said), not own.is_extended), default=None)

    def _conversation(self, before: Answered | None, asked: Request) -> Conversation | WrittenText:
        """Begin a conversation, or continue an earlier one. Raises RefusedError."""
        given: Any = asked.given
        try:
            if before is not None:
                conversation = copy.copy(before.conversation)
                conversation.go_on(before.completion.token_ids.tolist(), given[len(before.said) :])
            elif asked.is_chat:
                conversation = self.dialogue.begin(given, asked.tools)
            else:
                conversation = WrittenText(self.dialogue, given)
        except (ValueError, ConfigError) as error:
            raise RefusedError(str(error)) from error
        if not conversation.context_ids:
            raise RefusedError(f"the {'messages have' if asked.is_chat else 'prompt has'} no token")
        return conversation


class Endpoint:
    """Answers requests with the `Chats` of their key."""

    def __init__(self, model: str, max_model_len: int) -> None:
        self._model, self._max_model_len = Path(model).name, max_model_len
        self._chats: dict[str, Callable[[], Chats]] = {}
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self.base_url = ""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on `host` and set `base_url`. Port 0: any free port."""
        loop = asyncio.get_running_loop()
        make_request = functools.partial(web.BaseRequest, loop=loop, client_max_size=_MAX_BODY_BYTES)
        protocol = web.Server(self._serve, request_factory=make_request, access_log=None)
        self._server = await loop.create_server(protocol, host, port)
        host, port, *_ = self._server.sockets[0].getsockname()
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    def stop(self) -> None:
        """Stop listening until the next key is opened."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def open(self, chats: Callable[[], Chats]) -> str:
        """Return a new key. `chats` returns the object that answers requests with this key."""
        async with self._starting:
            if self._server is None:
                await self.start()
        key = f"sk-{secrets.token_hex(24)}"
        self._chats[key] = chats
        return key

    def close(self, key: str) -> None:
        del self._chats[key]

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            self._chats_of(request)
            match request.method, request.path.rstrip("/"):
                case "GET", "/v1/models":
                    model = {"id": self._model, "object": "model", "created": 0, "owned_by": "hpc-grpo"}
                    model["max_model_len"] = self._max_model_len
                    return web.json_response({"object": "list", "data": [model]})
                case "POST", route if route in _TAKEN:
                    return await self._complete(request, route)
            raise RefusedError(f"there is no {request.method} {request.path[:100]}", 404)
        except (RefusedError, RecursionError) as raised:
            error = raised if isinstance(raised, RefusedError) else RefusedError("the request is nested too deeply")
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            body = {"message": str(error), "type": kind, "param": None, "code": error.code}
            # The SDK retries a 500, unless this header forbids it.
            return web.json_response({"error": body}, status=error.status, headers={"x-should-retry": "false"})

    def _chats_of(self, request: web.BaseRequest) -> Chats:
        _, _, key = request.headers.get("Authorization", "").partition(" ")
        if (chats := self._chats.get(key)) is None:
            raise RefusedError("The API key belongs to no running episode.", 401, "invalid_api_key")
        return chats()

    async def _complete(self, request: web.BaseRequest, route: str) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
            json.dumps(body, ensure_ascii=False).encode()
        except web.HTTPRequestEntityTooLarge as error:
            raise RefusedError(f"a request has at most {_MAX_BODY_BYTES} bytes", 413) from error
        except ValueError as error:
            raise RefusedError(f"the request is not JSON, or a text holds half of a character: {error}") from error
        asked = _read(route, body, is_retry=request.headers.get("x-stainless-retry-count") != "0")
        chats = self._chats_of(request)  # the episode may have ended while the request was read
        try:
            answered = await chats.answer(asked)
        finally:
            if request.transport is not None and not request.transport.is_closing():
                chats.delivered(asked)
        message, streams, kind = answered.message, bool(body.get("stream")), "text_completion"
        said: dict[str, Any] = {"text": message["content"]}
        if asked.is_chat and streams:
            calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
            said, kind = {"delta": {**message, "tool_calls": calls} if calls else message}, "chat.completion.chunk"
        elif asked.is_chat:
            said, kind = {"message": message}, "chat.completion"
        name, now = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        common = {"id": name, "object": kind, "created": now, "model": self._model}
        wanted = body.get("logprobs")  # 0 in a text completion: logprobs of the sampled tokens
        logprobs = None if wanted is None or wanted is False else _logprobs(chats.dialogue, answered)
        reason = "tool_calls" if "tool_calls" in message else answered.completion.finish_reason
        choice = {"index": 0, **said, "logprobs": logprobs, "finish_reason": reason}
        prompt, written = len(answered.conversation.prompt), len(answered.completion.token_ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
        if not streams:
            return web.json_response({**common, "choices": [choice], "usage": usage})
        chunks: list[dict[str, Any]] = [{"choices": [{**choice, "finish_reason": None}]}]
        end: dict[str, Any] = {"delta": {}} if asked.is_chat else {"text": ""}
        chunks.append({"choices": [{**choice, **end, "logprobs": None}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({"choices": [], "usage": usage})
        text = "".join(f"data: {json.dumps({**common, **chunk})}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _demand(is_right: Any, rule: str, *value: Any) -> None:
    """Raise RefusedError with the rule and the value, unless it `is_right`."""
    if not is_right:
        raise RefusedError(f"{rule}, not {value[0]!r:.100}" if value else rule)


def _read(route: str, body: Any, *, is_retry: bool) -> Request:
    """Read a request. Raises RefusedError for fields that cannot have their usual effect."""
    _demand(isinstance(body, dict), "the request must be a JSON object")
    taken = _TAKEN[route]
    given = {name: value for name, value in body.items() if name not in (*taken, *_IGNORED) and value is not None}
    if wrong := {name: value for name, value in given.items() if value != _DEFAULTS.get(name)}:
        told = ", ".join(f"{name} = {json.dumps(value)[:100]}" for name, value in wrong.items())
        hints = "".join(f" {_INSTEAD[name]}" for name in wrong if name in _INSTEAD)
        raise RefusedError(
            f"{told[:1000]} cannot be used here.{hints} Supported fields: {', '.join(taken)}. Ignored fields: "
            f"{', '.join(_IGNORED)}."
        )
    limits = [own for own in (body.get("max_completion_tokens"), body.get("max_tokens")) if own is not None]
    for limit in limits:
        _demand(type(limit) is int and limit > 0, "max_tokens must be a positive integer", limit)
    logprobs, tools = body.get("logprobs"), body.get("tools") or []
    _demand(logprobs in (None, False, 0, 1), f"logprobs = {logprobs!r:.100}: only sampled tokens have them. Give 1.")
    _demand(_are_objects(tools), "tools must be a list of objects", tools)
    _demand(isinstance(body.get("stream_options") or {}, dict), "stream_options must be an object")
    most, is_chat = min(limits, default=None), "messages" in taken
    asked: Any = _messages(body.get("messages")) if is_chat else _prompt(body.get("prompt"))
    return Request(asked, is_chat, tools, most, is_retry)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _prompt(value: Any) -> Any:
    """Return the prompt: a text or token ids. Unpacks a list that holds one prompt. Raises RefusedError."""
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        [value] = value
    are_ids = isinstance(value, list) and value and all(type(token) is int for token in value)
    _demand(are_ids or isinstance(value, str), "prompt must be a text or token ids, one prompt per request", value)
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages for chat templates. Raises RefusedError if they are unsupported or end with an answer."""
    _demand(value and _are_objects(value), "messages must be a list of objects, at least one")
    messages = [_shown(message) for message in value]
    is_question = messages[-1]["role"] != "assistant"
    _demand(is_question, "the last message must not be of the role assistant: answers cannot be continued")
    return messages


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), as_text(message.get("content"))
    roles = ("system", "developer", "user", "assistant", "tool")
    _demand(role in roles, f"the role of a message must be one of {', '.join(roles)}", role)
    _demand(isinstance(content or "", str), "the content of a message or its parts must be text", content)
    shown: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content or ""}
    shown |= {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
    try:
        for call in message.get("tool_calls") or ():
            function = {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
            own = {"id": str(call.get("id")), "type": "function", "function": function}
            shown["tool_calls"] = [*shown.get("tool_calls", ()), own]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError("a tool call needs function.name, and function.arguments as JSON") from error
    return shown


def _key(message: Message) -> Any:
    """Return the key that identifies a message. Agents strip answers and drop text before calls, so it ignores both."""
    if message["role"] != "assistant":
        return message["role"], message["content"]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return "assistant", json.dumps(functions, sort_keys=True) if functions else message["content"].strip()


def _logprobs(dialogue: Dialogue, answered: Answered) -> dict[str, Any]:
    texts = [dialogue.decode([token]) for token in answered.completion.token_ids.tolist()]
    logprobs = answered.completion.engine_logprobs.tolist()
    if answered.asked.is_chat:
        tokens = [
            {"token": text, "bytes": [*text.encode()], "logprob": logprob, "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return {"content": tokens, "refusal": None}
    starts = [*itertools.accumulate(map(len, texts), initial=0)][:-1]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": starts}
