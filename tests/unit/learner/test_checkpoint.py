from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PosixPath
from typing import Any

from hpc_grpo.learner.checkpoint import hash_together

NUM_RANKS = 2


class StaleFolder(PosixPath):
    """A folder on a network file system whose listing was cached before `late` was written by another node."""

    late = "optimizer_rank_1.pt"

    def rglob(self, pattern: str) -> Iterator[Path]:  # type: ignore[override]
        return (path for path in Path(self).rglob(pattern) if path.name != self.late)


class ThreadGather:
    """A gather for ranks that are threads: it returns what each gave, in any order but the same for all."""

    def __init__(self, num_ranks: int) -> None:
        self._given: dict[int, Any] = {}
        self._barrier = threading.Barrier(num_ranks, timeout=10)

    def __call__(self, own: Any) -> list[Any]:
        self._given[threading.get_ident()] = own
        self._barrier.wait()
        gathered = list(self._given.values())
        self._barrier.wait()
        return gathered


def test_file_that_one_rank_does_not_see_yet_is_in_the_manifest(tmp_path: Path) -> None:
    names = ["deepspeed/optimizer_rank_0.pt", f"deepspeed/{StaleFolder.late}", "rng_rank_0.pt", "rng_rank_1.pt"]
    (tmp_path / "deepspeed").mkdir()
    for name in names:
        (tmp_path / name).write_text(name)
    views = [StaleFolder(tmp_path), tmp_path]
    gather = ThreadGather(NUM_RANKS)
    with ThreadPoolExecutor(NUM_RANKS) as ranks:
        hashing = [ranks.submit(hash_together, view, rank, gather) for rank, view in enumerate(views)]
        files = [future.result() for future in hashing]
    assert [[entry.name for entry in own] for own in files] == [names, names]
