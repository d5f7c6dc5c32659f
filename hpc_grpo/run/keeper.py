"""Reads and writes the run directory's files, in chunks, for processes on nodes that do not see it.

Runs in a Ray actor on the head (driver/actors.py); its methods may run concurrently. The other end is
learner/head_disk.py. Takes and returns bytes by name and position, never a whole file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePath

from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.run.checkpoint import FileEntry, hash_files
from hpc_grpo.run.files import fsync

CHUNK_BYTES = 4 << 20
"""Size of a chunk. At most two chunks of each file are in transfer, in Ray's object stores at both ends."""


@dataclass(frozen=True)
class Keeper:
    """The run directory `root`; names of files are relative to it. Methods raise OSError if the disk fails."""

    root: Path

    def write(self, name: str, offset: int, chunk: bytes) -> None:
        """Write a chunk at its offset, creating the file if needed. Repeating a write does no harm."""
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644), "wb") as file:
            file.seek(offset)
            file.write(chunk)

    def commit(self, sent: FileEntry, final: str) -> None:
        """Sync a file to the disk and rename it to `final`. Raises HpcGrpoError if it differs from what was `sent`."""
        path = self._path(sent.name)
        os.truncate(path, sent.size)  # an earlier attempt may have left a longer file
        fsync(path)
        (there,) = hash_files(self.root, [sent.name])
        if there != sent:
            raise HpcGrpoError(f"{path} is not what its learner sent: {there} instead of {sent}. Is the disk failing?")
        if final != sent.name:
            path.replace(self._path(final))

    def files(self, folder: str) -> list[tuple[str, int]]:
        """List the files in a folder, as names within the folder, with their sizes in bytes."""
        path = self._path(folder)
        found = sorted(file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
        return [(str(file.relative_to(path)), file.stat().st_size) for file in found]

    def read(self, name: str, offset: int) -> bytes:
        """Return the chunk of a file from `offset`; b"" at its end."""
        with os.fdopen(os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)

    def _path(self, name: str) -> Path:
        parts = PurePath(name)
        if parts.is_absolute() or ".." in parts.parts:
            raise ValueError(f"{name} lies outside of {self.root}")
        return self.root / parts
