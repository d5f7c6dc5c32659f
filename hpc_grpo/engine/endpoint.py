"""An OpenAI-compatible server of chat completions, in the engine's process: agents sample through it.

It listens on the loopback of its node, where the agents run. The key of a request says which episode it belongs to.
The routes are ours and not vLLM's: they need `Chats`, and aiohttp, which vLLM has imported, serves them.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_grpo.engine.chats import Answered, Asked, Chats, RefusedError, messages_of

if TYPE_CHECKING:
    from aiohttp import web

_MAX_BODY_BYTES = 16 << 20
_REFUSED = {
    "stop": "end answers by rollout.stop of the config",
    "n": "ask n times",
    "top_logprobs": "the log probability of the sampled token alone is known",
    "tool_choice": "a call can be neither forced nor forbidden",
    "response_format": "the format of an answer cannot be forced",
    "functions": "use tools",
    "audio": "the model writes text",
    "logit_bias": "it would change the distribution that is trained",
    "function_call": "use tools",
    "prediction": "no part of an answer can be given",
    "continue_final_message": "an answer is not continued",
    "chat_template_kwargs": "use data.template_args of the config",
    "min_tokens": "use rollout.min_new_tokens of the config",
    "stop_token_ids": "end answers by rollout.stop of the config",
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "the format of an answer cannot be forced",
    ),
}
"""Fields of a request that would change its answer, and cannot -> what to do."""
_HARMLESS = {"n": (1,), "tool_choice": ("auto",), "response_format": ({"type": "text"},)}


class Endpoint:
    """Answers requests with the `Chats` of their key."""

    def __init__(self, model: str, max_model_len: int) -> None:
        self._model, self._max_model_len = Path(model).name, max_model_len
        self._chats: dict[str, tuple[str, Callable[[], Chats]]] = {}
        self._numbers = itertools.count()
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
        """Listen no more, until the next key is opened."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def open(self, chats: Callable[[], Chats]) -> str:
        """Return a new key; `chats` returns what answers a request that has it."""
        async with self._starting:
            if self._server is None:
                await self.start()
        number, secret = str(next(self._numbers)), secrets.token_hex(24)
        self._chats[number] = secret, chats
        return f"sk-{number}-{secret}"

    def close(self, key: str) -> None:
        del self._chats[key.split("-")[1]]

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        try:
            self._chats_of(request)
            match request.method, request.path.rstrip("/"):
                case "GET", "/v1/models":
                    model = {"id": self._model, "object": "model", "created": 0, "owned_by": "hpc-grpo"}
                    model["max_model_len"] = self._max_model_len
                    return web.json_response({"object": "list", "data": [model]})
                case "POST", "/v1/chat/completions":
                    return await self._complete(request)
            raise RefusedError(f"there is no {request.method} {request.path[:100]}", 404)
        except (RefusedError, RecursionError) as raised:
            error = raised if isinstance(raised, RefusedError) else RefusedError("the request is nested too deeply")
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            body = {"message": str(error), "type": kind, "param": None, "code": error.code}
            # The SDK asks again where an answer says 500, and not where a header tells it so.
            return web.json_response({"error": body}, status=error.status, headers={"x-should-retry": "false"})

    def _chats_of(self, request: web.BaseRequest) -> Chats:
        _, _, key = request.headers.get("Authorization", "").partition(" ")
        number, _, secret = key.removeprefix("sk-").partition("-")
        known, chats = self._chats.get(number, ("", None))
        if not hmac.compare_digest(known.encode(), secret.encode("utf-8", "replace")) or chats is None:
            raise RefusedError("The API key is not that of an episode that is played.", 401, "invalid_api_key")
        return chats()

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        try:
            body = json.loads(await request.read())
        except web.HTTPRequestEntityTooLarge as error:
            raise RefusedError(f"a request has at most {_MAX_BODY_BYTES} bytes", 413) from error
        except ValueError as error:
            raise RefusedError("the request is no JSON") from error
        asked = _asked(body, is_retry=request.headers.get("x-stainless-retry-count") != "0")
        chats = self._chats_of(request)  # the episode may have ended while the request was read
        answered = await chats.answer(asked)
        transport = request.transport
        if transport is not None and not transport.is_closing():
            chats.delivered(asked)
        message = _message(answered)
        reason = "tool_calls" if answered.calls else answered.completion.finish_reason
        logprobs = _logprobs(chats, answered) if body.get("logprobs") else None
        common = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self._model}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}
            completion = {**common, "object": "chat.completion", "choices": [choice], "usage": _usage(answered)}
            return web.json_response(completion)
        for index, call in enumerate(message.get("tool_calls", ())):
            call["index"] = index
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": message, "logprobs": logprobs, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": reason}]},
        ]
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({"choices": [], "usage": _usage(answered)})
        lines = [json.dumps({**common, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
        text = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
        return web.Response(text=text, content_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _asked(body: Any, *, is_retry: bool) -> Asked:
    """Read a request. Raises RefusedError for what cannot be answered as it is meant."""
    if not isinstance(body, dict):
        raise RefusedError("the request must be a JSON object")
    for name, instead in _REFUSED.items():
        if body.get(name) and body[name] not in _HARMLESS.get(name, ()):
            raise RefusedError(f"{name} = {json.dumps(body[name])[:100]} is not possible here: {instead}")
    limits = [own for own in (body.get("max_completion_tokens"), body.get("max_tokens")) if own is not None]
    if not all(type(limit) is int and limit > 0 for limit in limits):
        raise RefusedError(f"max_tokens must be a positive integer, not {json.dumps(limits[-1])[:100]}")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RefusedError("tools must be a list of objects")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RefusedError("stream_options must be an object")
    return Asked(messages_of(body.get("messages")), tools, min(limits, default=None), is_retry)


def _message(answered: Answered) -> dict[str, Any]:
    if not answered.calls:
        return {"role": "assistant", "content": answered.text}
    calls = [
        {
            "id": f"call_{secrets.token_hex(8)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in answered.calls
    ]
    return {"role": "assistant", "content": answered.text.strip() or None, "tool_calls": calls}


def _logprobs(chats: Chats, answered: Answered) -> dict[str, Any]:
    content = []
    for token, logprob in zip(answered.sampled, answered.completion.engine_logprobs.tolist(), strict=True):
        text = chats.dialogue.decode([token])
        content.append({"token": text, "bytes": [*text.encode()], "logprob": logprob, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _usage(answered: Answered) -> Mapping[str, int]:
    prompt, written = answered.num_prompt_tokens, len(answered.completion.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
