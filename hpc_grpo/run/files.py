"""Files shared by processes: published atomically and readable after a crash. Writes wait while a disk is full.

Records, configs and published folders of a run directory are written with these functions, by one writer at a time. A
reader sees the old content or the new one. JSONL files are append-only, and readers skip an incomplete line.

A power cut or a bad disk may still empty, cut or change a file. Records (`write_record`) contain a digest: a damaged
record reads as missing. A record that no other file could restore has a copy beside it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.pulse import PULSE
from hpc_grpo.system.say import say

T = TypeVar("T")

_STAGED, _RETIRED = ".tmp", ".old"
_DIGEST = "digest"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HEADROOM = 1.1
_CHECK = ContextVar[Callable[[], None]]("check", default=lambda: None)
_BLOCK_BYTES = 1 << 16


def write_atomic(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Publish `content` at `path`, and create missing folders.

    Writes to a new file with a random name. Otherwise a user who can write to the folder could redirect the content
    through a link, or into a file of theirs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_STAGED}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, os.fstat(descriptor).st_mode & mode)  # a folder's default ACL may have added rights
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(descriptor)
        beside.replace(path)
    except BaseException:  # no other process knows the name
        beside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def writing(file: Path, fix: str = "Name another file.") -> Iterator[None]:
    """Raise ConfigError with `fix` if the block cannot write `file`, which the user has named."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: no name, such as ""
        raise ConfigError(f"{file} cannot be written ({getattr(error, 'strerror', error)}). {fix}") from error


def write_json_atomic(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def write_record(path: Path, values: dict[str, Any], *, keep_copy: bool = False) -> None:
    """Publish `values` with their digest. Use `keep_copy` for facts that no other file has."""
    # Convert values as a reader will see them: the digest sorts keys, and JSON keys are text.
    values = json.loads(json.dumps(values))
    text = json.dumps({**values, _DIGEST: digest_of(values)}, indent=2) + "\n"
    if keep_copy:
        write_atomic(copy_path(path), text)  # Write the copy first: if this fails, nothing has changed.
    write_atomic(path, text)


def read_record(path: Path, parse: Callable[[dict[str, Any]], T]) -> T | None:
    """Return `parse` of the record at `path`. If it is damaged or missing, use its copy; return None without a copy.

    `parse` may raise ValueError, TypeError, KeyError or AttributeError for values of another format: the record counts
    as damaged. Raises OSError for a file that cannot be read.
    """
    found = (_parsed(candidate, parse) for candidate in (path, copy_path(path)))
    return next((record for record in found if record is not None), None)


def from_known(record: Callable[..., T]) -> Callable[[dict[str, Any]], T]:
    """Return a function that makes the dataclass from values. Ignores unknown fields: newer versions may have more."""
    names = {entry.name for entry in fields(record)}  # type: ignore[arg-type]
    return lambda values: record(**{key: value for key, value in values.items() if key in names})


def is_damaged(path: Path, parse: Callable[[dict[str, Any]], Any] = dict) -> bool:
    """Return whether `path` exists and is no valid record."""
    return path.exists() and _parsed(path, parse) is None


def copy_path(path: Path) -> Path:
    """Return the path of the copy of a small file, beside it."""
    return path.with_name(f".{path.name}.copy")


def digest_of(value: Any) -> str:
    """Return a digest of JSON values, independent of the order of keys. Text is hashed unchanged."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a JSONL file that are objects. Skip lines damaged by a crash or a bad disk."""
    yield from (values for _, values in read_jsonl_from(path, 0))


def read_jsonl_from(path: Path, offset: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read like `read_jsonl`, from byte `offset` on. Yield each line with the offset of the next line."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            offset += len(line)
            if line.endswith(b"\n") and (values := _object(line)) is not None:
                yield offset, values


def drop_torn_line(path: Path) -> None:
    """Remove an incomplete last line, left by a crash: the next append would continue it. Reads only the file's end."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        begin = size = file.seek(0, os.SEEK_END)
        end = 0
        while begin and not end:
            begin = max(0, begin - _BLOCK_BYTES)
            file.seek(begin)
            newline = file.read(_BLOCK_BYTES).rfind(b"\n")
            end = begin + newline + 1 if newline >= 0 else 0
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())


def staging_path(final: Path) -> Path:
    """Return where folder `final` is prepared: beside it, because only a rename within a file system is atomic."""
    return final.with_name(f".{final.name}{_STAGED}")


def start_staging(final: Path) -> Path:
    """Create an empty staging folder for `final`. Removes the leftovers of an interrupted attempt."""
    staging = staging_path(final)
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    return staging


def publish_dir(final: Path) -> None:
    """Move the staged folder to `final`. Replaces an existing folder: the same step, trained again after a crash."""
    staging = staging_path(final)
    for file in staging.rglob("*"):
        if file.is_file():
            fsync(file)
    retired = final.with_name(f".{final.name}{_RETIRED}")
    if retired.exists():
        shutil.rmtree(retired)
    if final.exists():
        final.replace(retired)
    staging.replace(final)
    fsync(final.parent)
    if retired.exists():
        shutil.rmtree(retired)


def restore_dirs(parent: Path) -> None:
    """Restore step folders below `parent` whose replacement was killed between its two renames. Removes nothing."""
    for retired in parent.glob(f".step_*{_RETIRED}"):
        final = parent / retired.name[1 : -len(_RETIRED)]
        if not final.exists():
            retired.replace(final)


def recover_dirs(parent: Path) -> None:
    """Restore step folders below `parent` after a process was killed inside `publish_dir`, and remove its leftovers.

    Call it only while no process publishes there.
    """
    restore_dirs(parent)
    for leftover in (*parent.glob(f".step_*{_RETIRED}"), *parent.glob(f".step_*{_STAGED}")):
        shutil.rmtree(leftover)


def when_there_is_space(write: Callable[[], T], what: str, retry_s: float = 2.0) -> T:
    """Call `write` until it no longer fails with a full disk. So a full disk pauses the run instead of ending it.

    Other errors of `write` are raised. Use it only for writes of one process: a collective must not fail half-way, so
    code with collectives calls `wait_for_space` first.
    """
    problem = ""
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            problem = _wait_a_moment(problem, f"{os.strerror(error.errno)}: {what} cannot be written", retry_s)


@contextlib.contextmanager
def space_awaited_while(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` regularly while the block waits for disk space. `check` raises to end the wait."""
    token = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(token)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def wait_for_space(
    folder: Path, num_bytes: int, what: str, free: Callable[[Path], int] = free_bytes, retry_s: float = 2.0
) -> None:
    """Return once the file system of `folder` has room for `num_bytes` plus 10 %."""
    problem = ""
    while (found := free(folder)) < num_bytes * _HEADROOM:
        needs = f"{what} needs {num_bytes / 2**30:.2f} GiB in {folder}, where {found / 2**30:.2f} are free"
        problem = _wait_a_moment(problem, needs, retry_s)


def _wait_a_moment(told: str, problem: str, retry_s: float) -> str:
    """Wait, and print the reason the first time. Return the printed text."""
    if not told:
        say(f"{problem}. The run waits for space; free some, and the run continues.")
    _CHECK.get()()
    time.sleep(retry_s)
    PULSE.beat()
    return told or problem


def _parsed(path: Path, parse: Callable[[dict[str, Any]], T]) -> T | None:
    try:
        if (values := _object(path.read_bytes())) is None:
            return None
        written = values.pop(_DIGEST, None)  # None: the record is older than digests
        return parse(values) if written is None or written == digest_of(values) else None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def fsync(path: Path) -> None:
    """Force the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
