from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_grpo.learner import checkpoint

NUM_RANKS = 2


class StaleFolder(PosixPath):
    """A folder on a network file system whose listing was cached before `late` was written by another node."""

    late = "optimizer_rank_1.pt"

    def rglob(self, pattern: str) -> Iterator[Path]:  # type: ignore[override]
        return (path for path in Path(self).rglob(pattern) if path.name != self.late)


def all_gather_between_threads() -> Any:
    """`all_gather_object` for ranks that are threads of one pool."""
    given: dict[int, Any] = {}
    barrier = threading.Barrier(NUM_RANKS, timeout=10)

    def all_gather_object(lists: list[Any], own: Any) -> None:
        given[threading.get_ident()] = own
        barrier.wait()
        lists[:] = given.values()
        barrier.wait()

    return all_gather_object


def test_file_that_one_rank_does_not_see_yet_is_in_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["deepspeed/optimizer_rank_0.pt", f"deepspeed/{StaleFolder.late}", "rng_rank_0.pt", "rng_rank_1.pt"]
    (tmp_path / "deepspeed").mkdir()
    for name in names:
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(checkpoint, "dist", SimpleNamespace(all_gather_object=all_gather_between_threads()))
    views = [StaleFolder(tmp_path), tmp_path]
    with ThreadPoolExecutor(NUM_RANKS) as ranks:
        hashing = [ranks.submit(checkpoint._hash_together, view, rank, NUM_RANKS) for rank, view in enumerate(views)]
        files = [future.result() for future in hashing]
    assert [[entry.name for entry in own] for own in files] == [names, names]
