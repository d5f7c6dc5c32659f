"""Agents of the tests, as a user's file has them; they need the standard library alone."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpc_grpo import Turn


def ask(base_url, key, *said, patience_s=None, **fields):
    messages = [{"role": "user" if index % 2 == 0 else "assistant", "content": text} for index, text in enumerate(said)]
    body = json.dumps({"model": "any", "messages": messages, **fields}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=patience_s) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


class Agent:
    """Does what `row["do"]` says, between a first and a second question."""

    def __init__(self, marks: str | None = None) -> None:
        self._marks = marks

    def play(self, row, seed, base_url, api_key):
        what = row.get("do")
        if what == "nothing":
            return 1.0
        first = ask(base_url, api_key, "one")
        if what == "raise":
            raise KeyError("level")
        if what == "nonsense":
            return "good"
        if what == "hang":
            time.sleep(600)
        if what == "give up":
            with contextlib.suppress(TimeoutError):
                ask(base_url, api_key, "slow", patience_s=0.3)
            return 1.0
        if what == "exit":
            os._exit(3)
        if what == "quit":
            sys.exit(4)
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "die once" and not (mark := Path(self._marks, str(row["number"]))).exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "flood":
            return flood(base_url, api_key)
        if what == "side by side":
            with ThreadPoolExecutor(4) as pool:
                return float(len(list(pool.map(lambda text: ask(base_url, api_key, text), "abcd"))))
        second = ask(base_url, api_key, "one", first, "two")
        if what == "modules":
            names = ("pydantic", "torch", "numpy")
            found = [name for name in names if importlib.util.find_spec(name)]
            return Turn(reward=0.5, metrics={"found": len(found), "is_own": sys.prefix != sys.base_prefix})
        return len(first) + len(second)


def flood(base_url, key):
    """Ask ever more, as an agent that reads no error, until the server is gone."""
    while True:
        try:
            ask(base_url, key, "more")
        except urllib.error.HTTPError as error:
            if error.code == 401:
                raise


class AsyncAgent:
    async def play(self, row, seed, base_url, api_key):
        await asyncio.to_thread(ask, base_url, api_key, "one")
        if row.get("do") == "block":
            await asyncio.sleep(0.5)
            await asyncio.to_thread(ask, base_url, api_key, "two")
            await asyncio.gather(blocks())
        if row.get("do") == "think":
            await asyncio.sleep(1.0)
        if row.get("do") == "follow":
            while not Path(row["left"]).exists():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        if row.get("do") == "leave" and not Path(row["left"]).exists():
            Path(row["left"]).touch()
            self.task = asyncio.create_task(blocks())
        return 0.25


async def blocks():
    time.sleep(600)
