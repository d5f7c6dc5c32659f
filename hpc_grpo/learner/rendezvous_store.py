"""A learner's view of the rendezvous where the process group forms.

Apart from the group, which a learner without Ray forms too (`benchmarks/gpu_learner.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist


class RendezvousStore(dist.Store):  # type: ignore[misc]
    """The `Rendezvous` actor as torch.distributed takes it: every operation is one Ray call.

    `get` and `wait` wait up to the store's timeout for keys to appear. torch calls from threads of its own as well, and
    holds only the part of a store that is not Python: whoever gives it this one has to keep it.
    """

    def __init__(self, rendezvous: Any) -> None:
        super().__init__()
        self._rendezvous = rendezvous

    def set(self, key: str, value: bytes) -> None:
        ray.get(self._rendezvous.set.remote({key: value}))

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        ray.get(self._rendezvous.set.remote(dict(zip(keys, values, strict=True))))

    def get(self, key: str) -> bytes:
        return self._get([key], self.timeout)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._get(keys, self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._get(keys, self.timeout if timeout is None else timeout)

    def add(self, key: str, amount: int) -> int:
        return int(ray.get(self._rendezvous.add.remote(key, amount)))

    def append(self, key: str, value: bytes) -> None:
        ray.get(self._rendezvous.append.remote(key, value))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return bytes(ray.get(self._rendezvous.compare_set.remote(key, expected, desired)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(ray.get(self._rendezvous.has.remote(keys)))

    def delete_key(self, key: str) -> bool:
        return bool(ray.get(self._rendezvous.delete.remote(key)))

    def num_keys(self) -> int:
        return int(ray.get(self._rendezvous.size.remote()))

    def clone(self) -> RendezvousStore:
        """Return another view of the same rendezvous: torch takes one where it splits a group."""
        return RendezvousStore(self._rendezvous)

    def has_extended_api(self) -> bool:
        """Say that append, multi_get and multi_set are there."""
        return True

    # torch looks these two up under the names of its C++ interface.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _get(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        values = ray.get(self._rendezvous.get.remote(keys, timeout.total_seconds()))
        if values is None:
            raise dist.DistStoreError(f"After {timeout.total_seconds():.0f} s no value of {', '.join(keys)}.")
        return list(values)
