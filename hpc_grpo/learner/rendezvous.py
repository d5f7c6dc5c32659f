"""The meeting point of the learners: keys and values, reached through Ray calls that need the run's token.

With several learners, the driver starts it as a Ray actor. Learners use it as a `RendezvousStore` (`group.py`). It
imports neither torch nor Ray. With torch's `TCPStore`, any stranger could write, delete and shut down the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


class Rendezvous:
    """Keys and values in memory. Numbers are stored as decimal text, as in torch's stores."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def set(self, key: str, value: bytes) -> None:
        self._values[key] = value  # no await before this line: `add` reads and writes without another call in between
        async with self._changed:
            self._changed.notify_all()

    async def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes] | None:
        """Wait until all keys have values, and return the values; None after the timeout."""
        async with self._changed:
            waiting = self._changed.wait_for(lambda: self._values.keys() >= set(keys))
            try:
                await asyncio.wait_for(waiting, timeout_s)
            except TimeoutError:
                return None
            return [self._values[key] for key in keys]

    async def add(self, key: str, amount: int) -> int:
        """Add to the number at `key` (0 if missing) and return the new number."""
        total = int(self._values.get(key, b"0")) + amount
        await self.set(key, str(total).encode())
        return total

    async def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set `desired` if the value of `key` is `expected`; a missing value counts as b"".

        Returns the value that `key` has afterwards, or `expected` if it has none.
        """
        if self._values.get(key, b"") == expected:
            await self.set(key, desired)
        return self._values.get(key, expected)

    async def has(self, keys: Sequence[str]) -> bool:
        return self._values.keys() >= set(keys)

    async def delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None
