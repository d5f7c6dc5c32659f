"""Where a learner's files of the run are: a `RunDisk`, such as the one that its node sees.

Consumes states and paths in the run directory; produces files there, on the disk for good, and has those of a
checkpoint here to be read. A learner asks `here` for the path to write or read instead, so that DeepSpeed, which knows
folders alone, does the same wherever the run is (heads_disk.py: on another node).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from hpc_grpo.run.checkpoint import FileEntry, hash_files
from hpc_grpo.run.files import fsync


class RunDisk(Protocol):
    """The disk that holds the run, for one learner. All but `here` raise OSError as a disk does."""

    def here(self, path: Path) -> Path:
        """Return the path by which this process writes and reads what is at `path` of the run."""

    def save(self, state: Any, here: Path) -> None:
        """Write what torch saves of a state; it need not be on the disk for good yet."""

    def settle(self, folder: Path, files: Sequence[Path]) -> list[FileEntry]:
        """Have files in `folder`, both as `here` names them, on the disk for good; return them by their names in it."""

    def opened(self, folder: Path, *, whole: bool = False) -> AbstractContextManager[Path]:
        """Have a checkpoint `here` while the block runs: a file once it is fetched, of a `whole` one all."""

    def fetch(self, here: Path) -> None:
        """Have the content of a file of an opened checkpoint here."""

    def new_file(self, path: Path) -> AbstractContextManager[BinaryIO]:
        """Write, in the block, a file that appears at `path` of the run once it is whole and on the disk."""


class SeenDisk:
    """A disk that this process sees: the head's, or one that all nodes share."""

    def here(self, path: Path) -> Path:
        return path

    def save(self, state: Any, here: Path) -> None:
        torch.save(state, here)  # by its path: torch then writes without Python's lock

    def settle(self, folder: Path, files: Sequence[Path]) -> list[FileEntry]:
        for file in files:
            fsync(file)
        return hash_files(folder, [str(file.relative_to(folder)) for file in files])

    @contextmanager
    def opened(self, folder: Path, *, whole: bool = False) -> Iterator[Path]:
        yield folder

    def fetch(self, here: Path) -> None: ...

    @contextmanager
    def new_file(self, path: Path) -> Iterator[BinaryIO]:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.tmp")
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
