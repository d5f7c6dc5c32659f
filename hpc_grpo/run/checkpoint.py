"""Find, check and prune checkpoints. Needs no torch: commands use this module, and the driver at its start.

A checkpoint is a folder whose `manifest.json` lists each file with size and hash. The manifest is written last, so an
interrupted save has none. The learners write the files (learner/checkpoint.py).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path, PurePath
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.files import copy_path, read_jsonl, read_record, write_record
from hpc_grpo.run.paths import RunDir, step_dirs
from hpc_grpo.run.progress import read_state

MANIFEST = "manifest.json"
HASH_ALGORITHM = "xxh3_128"
_HASH_THREADS = 4
_OF_THE_MANIFEST = {MANIFEST, copy_path(Path(MANIFEST)).name}
_SHOWN_PROBLEMS = 4


@dataclass(frozen=True)
class FileEntry:
    """`name` is relative to the checkpoint, `size` in bytes, `digest` a hexadecimal HASH_ALGORITHM."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """`policy_version` counts the weights' optimizer steps. `driver_state` is the driver's `DriverState` as JSON."""

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


@dataclass(frozen=True)
class Damaged:
    """A step's folder that is no valid checkpoint, and its problems."""

    step: int
    path: Path
    problems: tuple[str, ...]

    def __str__(self) -> str:
        shown = self.problems[:_SHOWN_PROBLEMS]
        further = f"; and {len(self.problems) - len(shown)} more" if len(self.problems) > len(shown) else ""
        return f"{self.path.name}: {'; '.join(shown)}{further}"


def inspect_checkpoints(run_dir: RunDir, check_hashes: bool = True) -> Iterator[Checkpoint | Damaged]:
    """Yield a Checkpoint or a Damaged for each step's folder, newest first. Verifies each when it is yielded.

    Without `check_hashes`, compares only names and sizes: fast for files of any size.
    """
    for step, path in sorted(step_dirs(run_dir.checkpoints).items(), reverse=True):
        if (manifest := read_manifest(path)) is None:
            wrong = "cut short, changed or of another format" if (path / MANIFEST).exists() else "missing"
            yield Damaged(step, path, (f"{MANIFEST} is {wrong}",))
            continue
        found = problems(path, manifest, check_hashes)
        if manifest.driver_state.get("step", step) != step:
            found.append(f"its manifest is that of step {manifest.driver_state['step']}")
        yield Damaged(step, path, tuple(found)) if found else Checkpoint(step, path, manifest)


def valid_checkpoints(run_dir: RunDir, check_hashes: bool = True) -> Iterator[Checkpoint]:
    """Yield the run's valid checkpoints, newest first, like `inspect_checkpoints`."""
    yield from (found for found in inspect_checkpoints(run_dir, check_hashes) if isinstance(found, Checkpoint))


def has_trained(run_dir: RunDir) -> bool:
    """Return whether the run has a finished step or a checkpoint, also one of step 0."""
    has_steps = next(read_jsonl(run_dir.ledger), None) is not None
    return has_steps or next(valid_checkpoints(run_dir, check_hashes=False), None) is not None


def find_checkpoint(run_dir: RunDir, check_hashes: bool = True) -> tuple[Checkpoint | None, list[Damaged]]:
    """Return the checkpoint to resume from, and newer damaged ones; None for a run that never saved.

    Raises ConfigError if the run has saved and no checkpoint is valid: only the user may start over.
    """
    damaged: list[Damaged] = []
    for found in inspect_checkpoints(run_dir, check_hashes):
        if isinstance(found, Checkpoint):
            return found, damaged
        damaged.append(found)
    start_over = (
        f"To start over from step 0: mv {run_dir.path} {run_dir.path}.before, then the same command; or give another "
        f"run.name."
    )
    if damaged:
        listed = "\n".join(f"  {checkpoint}" for checkpoint in damaged)
        raise ConfigError(
            f"No checkpoint in {run_dir.checkpoints} is valid, so the run cannot go on from where it was:\n{listed}\n"
            f"Nothing was changed or removed. Restore a checkpoint from a backup. {start_over}"
        )
    state = read_state(run_dir)
    has_saved = (state is not None and state.save_p95_s is not None) or any(
        attempt.first_step > 0 for attempt in read_attempts(run_dir)
    )
    is_between_renames = any(run_dir.checkpoints.glob(".step_*.old"))
    if has_saved and not is_between_renames:
        raise ConfigError(
            f"The run has written checkpoints, but {run_dir.checkpoints} holds none, so the run cannot go on from "
            f"where it was. Restore them. {start_over}"
        )
    return None, damaged


def set_aside(damaged: Damaged) -> Path:
    """Rename a damaged checkpoint so that the run can write its step again. Return the new path."""
    names = (f"{damaged.path.name}.damaged{'' if number == 1 else f'-{number}'}" for number in count(1))
    return damaged.path.rename(next(aside for aside in map(damaged.path.with_name, names) if not aside.exists()))


def newest_step(run_dir: RunDir) -> int:
    """Return the step of the newest valid checkpoint, 0 without one. Compares names and sizes only."""
    return next((checkpoint.step for checkpoint in valid_checkpoints(run_dir, check_hashes=False)), 0)


def read_manifest(path: Path) -> Manifest | None:
    """Return the manifest of the checkpoint folder `path`; None if it is missing, damaged or of another format."""

    def parse(values: dict[str, Any]) -> Manifest:
        return Manifest(**{**values, "files": tuple(FileEntry(**entry) for entry in values["files"])})

    try:
        return read_record(path / MANIFEST, parse)
    except OSError:
        return None


def write_manifest(path: Path, manifest: Manifest) -> None:
    write_record(path / MANIFEST, asdict(manifest), keep_copy=True)


def problems(path: Path, manifest: Manifest, check_hashes: bool) -> list[str]:
    """List the problems of a checkpoint's files; [] if the manifest lists each file and no other."""
    listed = {entry.name for entry in manifest.files}
    found = [] if listed else ["its manifest lists no files"]
    if manifest.hash_algorithm != HASH_ALGORITHM:
        found.append(f"its hashes are {manifest.hash_algorithm}, but this version reads {HASH_ALGORITHM}")
    try:
        found += [problem for entry in manifest.files if (problem := _file_problem(path, entry))]
        there = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_symlink() or not file.is_dir()}
        found += [f"{name} is not in its manifest" for name in sorted(there - listed - _OF_THE_MANIFEST)]
        if check_hashes and not found:
            current = hash_files(path, [entry.name for entry in manifest.files])
            pairs = zip(manifest.files, current, strict=True)
            found = [f"{entry.name} is corrupt" for entry, now in pairs if entry.digest != now.digest]
    except OSError as error:
        found.append(f"{error.filename} cannot be read ({error.strerror})")
    return found


def _file_problem(path: Path, entry: FileEntry) -> str:
    name = PurePath(entry.name)
    if name.is_absolute() or ".." in name.parts:
        return f"{entry.name} lies outside of the checkpoint"
    file = path / name
    if file.is_symlink() or not file.is_file():
        return f"{entry.name} is {'a link' if file.is_symlink() else 'missing'}"
    size = file.stat().st_size
    return "" if size == entry.size else f"{entry.name} has {size} bytes instead of {entry.size}"


def hash_files(path: Path, names: list[str]) -> list[FileEntry]:
    """Return size and digest of each file, in the order of `names`."""
    import xxhash

    def entry_of(name: str) -> FileEntry:
        with (path / name).open("rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
            return FileEntry(name, file.tell(), digest)

    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return list(pool.map(entry_of, names))


def prune_checkpoints(run_dir: RunDir, keep_last: int) -> list[int]:
    """Remove the checkpoints older than the newest `keep_last` valid ones. Return the removed steps.

    Newer folders stay, valid or not. Removes nothing while fewer than `keep_last` valid checkpoints exist.
    """
    kept = [checkpoint.step for _, checkpoint in zip(range(keep_last), valid_checkpoints(run_dir, False), strict=False)]
    if len(kept) < keep_last:
        return []
    removed = sorted(step for step in step_dirs(run_dir.checkpoints) if step < min(kept))
    for step in removed:
        remove_checkpoint(run_dir.checkpoint(step))
    return removed


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint. Its manifest goes first, so that a half-deleted checkpoint is not valid."""
    copy_path(path / MANIFEST).unlink(missing_ok=True)
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)
