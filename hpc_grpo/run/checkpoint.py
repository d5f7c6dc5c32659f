"""Find, check and prune checkpoints. Without torch: the driver asks before anything is loaded, commands at any time.

A checkpoint is a folder with a `manifest.json` whose every file is there, with its size and hash. The manifest is
written last, so a save that was cut short leaves none. The learners write the files (learner/checkpoint.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.run.paths import RunDir, step_dirs

MANIFEST = "manifest.json"
HASH_ALGORITHM = "xxh3_128"
_HASH_BLOCK_BYTES = 1 << 22
_HASH_THREADS = 4


@dataclass(frozen=True)
class FileEntry:
    """`name` is relative to the checkpoint, `size` in bytes, `digest` a hexadecimal HASH_ALGORITHM."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """`driver_state` is the driver's own JSON: next ordinal, step and whatever else it resumes from.

    `policy_version` counts the optimizer steps behind the weights.
    """

    policy_version: int
    world_size: int
    zero_stage: int
    files: tuple[FileEntry, ...]
    driver_state: dict[str, Any] = field(default_factory=dict)
    hash_algorithm: str = HASH_ALGORITHM


@dataclass(frozen=True)
class Checkpoint:
    step: int
    path: Path
    manifest: Manifest

    @property
    def driver_state(self) -> dict[str, Any]:
        return self.manifest.driver_state


def valid_checkpoints(run_dir: RunDir, check_hashes: bool = True) -> Iterator[Checkpoint]:
    """Yield the run's valid checkpoints, newest first; each is verified when it is asked for.

    Without `check_hashes` only the presence and sizes of files are looked at: fast however large they are.
    """
    for step, path in sorted(step_dirs(run_dir.checkpoints).items(), reverse=True):
        manifest = read_manifest(path)
        if manifest is not None and not problems(path, manifest, check_hashes):
            yield Checkpoint(step, path, manifest)


def newest_valid_checkpoint(run_dir: RunDir) -> Checkpoint | None:
    """Return the checkpoint to resume from, its hashes verified; None if there is none."""
    return next(valid_checkpoints(run_dir), None)


def newest_step(run_dir: RunDir) -> int:
    """Return the step of the newest whole checkpoint, 0 without one; look at names and sizes only."""
    return next((checkpoint.step for checkpoint in valid_checkpoints(run_dir, check_hashes=False)), 0)


def read_manifest(path: Path) -> Manifest | None:
    """Return the manifest of the checkpoint folder `path`; None if it is absent or not one."""
    try:
        values = json.loads((path / MANIFEST).read_text())
        files = tuple(FileEntry(**entry) for entry in values.pop("files"))
        return Manifest(files=files, **values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_manifest(path: Path, manifest: Manifest) -> None:
    write_json_atomic(path / MANIFEST, asdict(manifest))


def problems(path: Path, manifest: Manifest, check_hashes: bool) -> list[str]:
    """List what is wrong with the files of a checkpoint; empty if nothing is."""
    found = []
    for entry in manifest.files:
        file = path / entry.name
        if not file.is_file():
            found.append(f"{entry.name} is missing")
        elif file.stat().st_size != entry.size:
            found.append(f"{entry.name} has {file.stat().st_size} bytes instead of {entry.size}")
    if check_hashes and not found:
        current = hash_files(path, [entry.name for entry in manifest.files])
        found = [f"{a.name} is corrupt" for a, b in zip(manifest.files, current, strict=True) if a.digest != b.digest]
    return found


def hash_files(path: Path, names: list[str]) -> list[FileEntry]:
    """Return size and digest of each file, in the order of `names`."""
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return list(pool.map(lambda name: _hash_file(path, name), names))


def _hash_file(path: Path, name: str) -> FileEntry:
    import xxhash

    hasher = xxhash.xxh3_128()
    size = 0
    with (path / name).open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            hasher.update(block)
            size += len(block)
    return FileEntry(name, size, hasher.hexdigest())


def prune_checkpoints(run_dir: RunDir, keep_last: int) -> list[int]:
    """Remove the checkpoints older than the newest `keep_last` valid ones; return the steps removed.

    Folders newer than those are left alone, valid or not, and nothing goes while fewer valid ones exist.
    """
    kept = [checkpoint.step for _, checkpoint in zip(range(keep_last), valid_checkpoints(run_dir, False), strict=False)]
    if len(kept) < keep_last:
        return []
    removed = sorted(step for step in step_dirs(run_dir.checkpoints) if step < min(kept))
    for step in removed:
        remove_checkpoint(run_dir.checkpoint(step))
    return removed


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint; its manifest goes first, so that one half deleted is not taken for a whole."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)
