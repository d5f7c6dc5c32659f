"""`hpc-grpo model serve` with an engine whose steps a test writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import aiohttp
import pytest

from hpc_grpo.cli import serve
from hpc_grpo.errors import LaunchError
from tests.support.configs import minimal_config

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


class FailingSampler:
    """Takes requests, and fails over its first step."""

    def __init__(self, *_: object) -> None:
        self._waiting: list[Future[Any]] = []

    def add(self, requests: Sequence[Any]) -> list[Future[Any]]:
        new: list[Future[Any]] = [Future() for _ in requests]
        self._waiting += new
        return new

    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> None:
        failure = RuntimeError("the GPU has fallen off the bus")
        while self._waiting:
            self._waiting.pop().set_exception(failure)
        raise failure


def test_a_server_whose_engine_fails_answers_and_ends_with_the_engines_error(
    make_tokenizer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = minimal_config(data={"eval": {"path": "eval.jsonl"}}, model={"path": "/models/tiny", "device": "cpu"})
    tokenizer, told = make_tokenizer(TEMPLATE), list[str]()
    monkeypatch.setattr("hpc_grpo.data.tokenizer.load_tokenizer", lambda _: tokenizer)
    monkeypatch.setattr("hpc_grpo.data.tokenizer.stop_token_ids", lambda *_: ())
    monkeypatch.setattr("hpc_grpo.engine.vllm.engine_environment", lambda *_, **__: {})
    monkeypatch.setattr("hpc_grpo.engine.vllm.start_vllm", lambda *_, **__: None)
    monkeypatch.setattr("hpc_grpo.engine.sampler.Sampler", FailingSampler)
    monkeypatch.setattr(serve, "echo", told.append)

    async def ask() -> int:
        server = asyncio.create_task(serve._serve(config, "127.0.0.1", 0))
        while not told and not server.done():
            await asyncio.sleep(0.01)
        url, key = (line.split("=", 1)[1] for line in told[0].splitlines())
        headers, body = {"Authorization": f"Bearer {key}"}, {"model": "x", "prompt": "1+1"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/completions", json=body, headers=headers) as got,
        ):
            status = got.status
        with pytest.raises(LaunchError, match=r"The engine has failed.*RuntimeError: the GPU has fallen off the bus"):
            await server
        return status

    assert asyncio.run(asyncio.wait_for(ask(), 60.0)) == 500
