"""An OpenAI-compatible server of chat and text completions, in the engine's process. Agents sample through it.

It listens on the loopback of its node, where the agents run. The key of a request identifies its episode. vLLM's own
routes cannot be used, because the routes need `Chats`. aiohttp, which vLLM has imported, serves them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_grpo.engine.chats import Answered, Asked, Chats, RefusedError, messages_of, prompt_of

if TYPE_CHECKING:
    from aiohttp import web

_MAX_BODY_BYTES = 16 << 20
_COMPLETIONS = "/v1/completions"
_TAKEN = {
    "/v1/chat/completions": ("messages", "tools", "max_tokens", "max_completion_tokens"),
    _COMPLETIONS: ("prompt", "max_tokens"),
}
"""The fields of each route, in addition to the common fields."""
_TAKEN_BY_ALL = ("logprobs", "stream", "stream_options")
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
"""Ignored: training uses the run's own sampling."""
_OF_ACCOUNTS = ("model", "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
"""Ignored: they do not change the answer."""
_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "stop": [],
    "echo": False,
    "suffix": "",
    "logit_bias": {},
    "top_logprobs": 0,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
"""Fields that may only have this value."""
_INSTEAD = {
    "n": "Ask n times.",
    "stop": "End answers by rollout.stop of the config.",
    "stop_token_ids": "End answers by rollout.stop of the config.",
    "min_tokens": "Use rollout.min_new_tokens of the config.",
    "chat_template_kwargs": "Use data.template_args of the config.",
}


class Endpoint:
    """Answers requests with the `Chats` of their key."""

    def __init__(self, model: str, max_model_len: int) -> None:
        self._model, self._max_model_len = Path(model).name, max_model_len
        self._chats: dict[str, Callable[[], Chats]] = {}
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self.base_url = ""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; port 0: any that is free."""
        from aiohttp import web

        loop = asyncio.get_running_loop()

        def request_of(message: Any, body: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(message, body, protocol, writer, task, loop, client_max_size=_MAX_BODY_BYTES)

        protocol = web.Server(self._serve, request_factory=request_of, access_log=None)
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
        from aiohttp import web

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
            raise RefusedError("The API key is not that of an episode that is played.", 401, "invalid_api_key")
        return chats()

    async def _complete(self, request: web.BaseRequest, route: str) -> web.StreamResponse:
        from aiohttp import web

        try:
            body = json.loads(await request.read())
        except web.HTTPRequestEntityTooLarge as error:
            raise RefusedError(f"a request has at most {_MAX_BODY_BYTES} bytes", 413) from error
        except ValueError as error:
            raise RefusedError("the request is no JSON") from error
        asked = _asked(route, body, is_retry=request.headers.get("x-stainless-retry-count") != "0")
        chats = self._chats_of(request)  # the episode may have ended while the request was read
        answered = await chats.answer(asked)
        transport = request.transport
        if transport is not None and not transport.is_closing():
            chats.delivered(asked)
        reason = "tool_calls" if answered.calls else answered.completion.finish_reason
        wanted = body.get("logprobs")  # 0 in a text completion: logprobs of the sampled tokens
        tokens = None if wanted is None or wanted is False else _tokens(chats, answered)
        streams = bool(body.get("stream"))
        said: dict[str, Any] = {"text": answered.text}
        if route == _COMPLETIONS:
            kind = "text_completion"
            logprobs: Any = tokens and _text_logprobs(tokens)
        else:
            kind = "chat.completion.chunk" if streams else "chat.completion"
            said = {"delta" if streams else "message": _message(answered, streams=streams)}
            logprobs = tokens and {"content": tokens, "refusal": None}
        common = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self._model}
        common["object"] = kind
        choice = {"index": 0, **said, "logprobs": logprobs, "finish_reason": reason}
        if not streams:
            return web.json_response({**common, "choices": [choice], "usage": _usage(answered)})
        chunks: list[dict[str, Any]] = [
            {"choices": [{**choice, "finish_reason": None}]},
            {"choices": [{**choice, **({"text": ""} if "text" in said else {"delta": {}}), "logprobs": None}]},
        ]
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({"choices": [], "usage": _usage(answered)})
        lines = [json.dumps({**common, **chunk}) for chunk in chunks]
        text = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
        return web.Response(text=text, content_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _asked(route: str, body: Any, *, is_retry: bool) -> Asked:
    """Read a request. Raises RefusedError for fields that cannot have their usual effect."""
    if not isinstance(body, dict):
        raise RefusedError("the request must be a JSON object")
    taken, ignored = (*_TAKEN[route], *_TAKEN_BY_ALL), (*_OF_SAMPLING, *_OF_ACCOUNTS)
    wrong = [
        name
        for name, value in body.items()
        if name not in (*taken, *ignored) and value is not None and value != _DEFAULTS.get(name)
    ]
    if wrong:
        told = ", ".join(f"{name} = {json.dumps(body[name])[:100]}" for name in wrong)
        hints = "".join(f" {_INSTEAD[name]}" for name in wrong if name in _INSTEAD)
        raise RefusedError(
            f"{told[:1000]} cannot be answered as it is meant.{hints} Taken are {', '.join(taken)}. Ignored are "
            f"{', '.join(ignored)}."
        )
    limits = [own for own in (body.get("max_completion_tokens"), body.get("max_tokens")) if own is not None]
    if not all(type(limit) is int and limit > 0 for limit in limits):
        raise RefusedError(f"max_tokens must be a positive integer, not {json.dumps(limits[-1])[:100]}")
    if (logprobs := body.get("logprobs")) not in (None, False, 0, 1):  # True is 1
        raise RefusedError(f"logprobs = {json.dumps(logprobs)[:100]}: only those of sampled tokens are known. Give 1.")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RefusedError("tools must be a list of objects")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RefusedError("stream_options must be an object")
    most = min(limits, default=None)
    if route == _COMPLETIONS:
        return Asked((), max_tokens=most, is_retry=is_retry, prompt=prompt_of(body.get("prompt")))
    return Asked(messages_of(body.get("messages")), tools, most, is_retry)


def _message(answered: Answered, *, streams: bool) -> dict[str, Any]:
    if not answered.calls:
        return {"role": "assistant", "content": answered.text}
    calls = [
        {
            "id": f"call_{secrets.token_hex(8)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        | ({"index": index} if streams else {})
        for index, call in enumerate(answered.calls)
    ]
    return {"role": "assistant", "content": answered.text.strip() or None, "tool_calls": calls}


def _tokens(chats: Chats, answered: Answered) -> list[dict[str, Any]]:
    tokens = []
    for token, logprob in zip(answered.sampled, answered.completion.engine_logprobs.tolist(), strict=True):
        text = chats.dialogue.decode([token])
        tokens.append({"token": text, "bytes": [*text.encode()], "logprob": logprob, "top_logprobs": []})
    return tokens


def _text_logprobs(tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts = [token["token"] for token in tokens]
    ends = [*itertools.accumulate(map(len, texts))]
    logprobs = [token["logprob"] for token in tokens]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": [0, *ends[:-1]]}


def _usage(answered: Answered) -> Mapping[str, int]:
    prompt, written = len(answered.prompt), len(answered.completion.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
