"""Fingerprints of files by their contents, and no times: a file that was copied or restored is the same file."""

from __future__ import annotations

import hashlib
from pathlib import Path

_WHOLE_BYTES = 1 << 26
_NUM_BLOCKS, _BLOCK_BYTES = 64, 1 << 16

_LEFT_BY_DATASETS = ("cache-", "tmp")
"""Beginnings of names of files that the library `datasets` leaves in a saved data set that somebody else works with."""


def of_files(path: Path, whole: bool) -> dict[str, str]:
    """Return the fingerprint of a file, or of each file below a folder, by name."""
    if path.is_file():
        return {path.name: of_file(path, whole)}
    names = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    return {str(name): of_file(path / name, whole) for name in names if not _is_left_over(name)}


def of_file(path: Path, whole: bool) -> str:
    """Hash a file; a large one, unless `whole`, by 64 blocks spread over it and its size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if whole or size <= _WHOLE_BYTES:
            return f"{size} bytes, sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
        sampled = hashlib.sha256()
        for number in range(_NUM_BLOCKS):
            file.seek((size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1))
            sampled.update(file.read(_BLOCK_BYTES))
    return f"{size} bytes, sha256 of {_NUM_BLOCKS} blocks {sampled.hexdigest()[:16]}"


def _is_left_over(name: Path) -> bool:
    """Tell whether a file of a data set's folder is a tool's own, which nobody reads as data."""
    return name.name.startswith(_LEFT_BY_DATASETS) or any(part.startswith(".") for part in name.parts)
