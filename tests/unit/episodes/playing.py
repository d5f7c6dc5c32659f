"""Environments of the tests, as a user's file has them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time

from hpc_grpo import Turn


class Guess:
    """Thinks of a number from the global `random`, which another session must not move."""

    def __init__(self, highest: int = 8) -> None:
        self._highest = highest

    def reset(self, row, seed):
        self._secret = random.randint(1, self._highest)
        return f"Guess {row['what']} from 1 to {self._highest}."

    def step(self, message):
        found = message.strip() == str(self._secret)
        hint = f"No, draw {random.random()}."
        return Turn(hint, reward=float(found), done=found, metrics={"guesses": 1})

    def secret(self):
        return self._secret


class Slow:
    """Answers after a while, beside other sessions, unless it blocks them: `block 2` does so for two seconds."""

    async def reset(self, row, seed):
        return "go"

    async def step(self, message):
        how, _, seconds = message.rpartition(" ")
        if how == "block":
            await asyncio.sleep(0.2)
            time.sleep(float(seconds))
        else:
            await asyncio.sleep(float(seconds))
        return Turn("again")


class Bad:
    """Does what a message says, nothing good."""

    def reset(self, row, seed):
        if row.get("raises"):
            raise RuntimeError("no such level")
        return row.get("first", "go")

    def step(self, message):
        if message == "raise":
            raise KeyError("level")
        if message == "nonsense":
            return 3
        if message == "silent":
            return Turn()
        if message == "nan":
            return Turn("x", reward=float("nan"))
        if message == "vast":
            return Turn("x", reward=10**400)
        if message == "ours":
            return Turn("x", metrics={"turns": 1})
        if message == "half":
            return Turn("\ud83d")
        if message == "long":
            return Turn("x" * 2_000_000)
        if message == "wide":
            return Turn({"role": "tool", "content": "x", "name": "x" * 2_000_000})
        if message == "late":
            time.sleep(1.2)
        if message == "own deadline":
            raise TimeoutError
        if message == "set":
            return Turn([{"role": "user", "content": "x", "more": {1, 2}}])
        if message == "hang":
            time.sleep(600)
        if message == "exit":
            os._exit(3)
        if message == "flood":
            for _ in range(3_000):
                print("y" * 1_000)
        if message == "eat":
            return Turn(str(len(bytearray(64 << 30))))
        if message == "fork" and os.fork() == 0:
            time.sleep(600)
        if message == "close":
            for descriptor in range(3, 100):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            time.sleep(600)
        if message == "quit":
            sys.exit(4)
        return Turn(f"did {message}", reward=0.5)


class Halfway:
    def reset(self, row, seed):
        return "go"


class Broken:
    def __init__(self) -> None:
        raise ValueError("no licence")
