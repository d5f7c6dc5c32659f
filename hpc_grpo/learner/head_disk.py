"""The head's disk for a learner on another node: files are sent and fetched over Ray, in chunks.

The other end is `run/keeper.py`. A learner holds at most three chunks of a file: two in transit and one being filled.
A folder of this node holds a checkpoint while the checkpoint is open for reading.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import socket
import stat
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import ray
import torch
from ray.exceptions import RayTaskError

from hpc_grpo.errors import LaunchError
from hpc_grpo.learner.staging import RunDisk
from hpc_grpo.run.checkpoint import MANIFEST, FileEntry
from hpc_grpo.run.contract import DISKS_VARIABLE
from hpc_grpo.run.files import copy_path
from hpc_grpo.run.keeper import CHUNK_BYTES

_UNDERWAY = 2
"""Chunks of a file in transit at once: one is written while the next one travels."""

_OUTLINE_MODE = stat.S_IWUSR
"""The mode of an outline: a file with its final size but no content, which must not be read."""


class HeadDisk(RunDisk):
    """The head's disk, for a learner on another node. `root` is the run directory, `here` a local work folder.

    Files written to it are sent to the head. The node's learners share the fetched files of an open checkpoint. A file
    that is not fetched yet is an outline.
    """

    def __init__(self, keeper: Any, root: Path, here: Path) -> None:
        """`keeper` is the handle of a `run.keeper.Keeper` actor."""
        self._keeper, self._root, self._here = keeper, root, here
        self._sent: dict[Path, FileEntry] = {}

    def here(self, path: Path) -> Path:
        return self._here / path.relative_to(self._root)

    def save(self, state: Any, here: Path) -> None:
        with self._sending(self._name(here)) as (file, sending):
            torch.save(state, file)
        self._sent[here] = sending.entry

    def settle(self, folder: Path, files: Sequence[Path]) -> list[FileEntry]:
        """Send the files that `save` did not send, and empty the folder."""
        for path in files:
            if path not in self._sent:
                with self._sending(self._name(path)) as (file, sending), path.open("rb") as written:
                    shutil.copyfileobj(written, file, CHUNK_BYTES)
                self._sent[path] = sending.entry
        sent = {str(path.relative_to(folder)): self._sent.pop(path) for path in files}
        shutil.rmtree(folder, ignore_errors=True)
        return [FileEntry(name, entry.size, entry.digest) for name, entry in sent.items()]

    @contextmanager
    def opened(self, folder: Path, *, whole: bool = False) -> Iterator[Path]:
        here = self.here(folder)
        here.parent.mkdir(parents=True, exist_ok=True)
        with _locked(here.with_name(f".{here.name}.lock"), fcntl.LOCK_SH) as lock:
            names = self._outline(folder, here)
            for name in names if whole else {MANIFEST, copy_path(Path(MANIFEST)).name}.intersection(names):
                self.fetch(here / name)
            try:
                yield here
            finally:
                with suppress(BlockingIOError):  # another learner still reads: the last one removes the folder
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(here, ignore_errors=True)

    def fetch(self, here: Path) -> None:
        with _locked(here, fcntl.LOCK_EX):  # only this file: other learners fetch other files in parallel
            size, mode = here.stat().st_size, stat.S_IMODE(here.stat().st_mode)
            if mode != _OUTLINE_MODE:  # already fetched, maybe by another learner of the node
                return
            beside = self._here / f".fetched-{self._name(here).replace('/', '--')}"
            waiting: deque[Any] = deque()
            try:
                with beside.open("wb") as file:
                    for offset in range(0, size, CHUNK_BYTES):
                        waiting.append(self._keeper.read.remote(self._name(here), offset))
                        if len(waiting) == _UNDERWAY:
                            file.write(_result(waiting.popleft()))
                    while waiting:
                        file.write(_result(waiting.popleft()))
            except OSError as error:
                beside.unlink(missing_ok=True)
                if error.errno != errno.ENOSPC:
                    raise
                raise LaunchError(
                    f"Node {socket.gethostname()} fetches its part of the checkpoint from the head, but {self._here} "
                    f"has no space for {here.name} ({size / 2**30:.1f} GiB). Free space there, or set launch.local_dir "
                    f"to a folder on a larger disk."
                ) from error
            beside.replace(here)

    @contextmanager
    def new_file(self, path: Path) -> Iterator[BinaryIO]:
        name = path.relative_to(self._root)
        with self._sending(str(name.with_name(f".{name.name}.tmp")), str(name)) as (file, _):
            yield file

    def _name(self, here: Path) -> str:
        return str(here.relative_to(self._here))

    @contextmanager
    def _sending(self, name: str, final: str | None = None) -> Iterator[tuple[BinaryIO, Sending]]:
        sending = Sending(self._keeper, name)
        with io.BufferedWriter(sending, CHUNK_BYTES) as file:
            yield cast(BinaryIO, file), sending
        if sending.failure is not None:
            raise sending.failure
        _result(self._keeper.commit.remote(sending.entry, final or name))

    def _outline(self, folder: Path, here: Path) -> list[str]:
        """Create the head's folder on this node, with its files as outlines. Return the names of the files."""
        names = []
        with _locked(self._here / ".outlining", fcntl.LOCK_EX):
            for name, size in _result(self._keeper.files.remote(str(folder.relative_to(self._root)))):
                names.append(name)
                (here / name).parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):
                    descriptor = os.open(here / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OUTLINE_MODE)
                    os.truncate(descriptor, size)
                    os.close(descriptor)
        return names


class Sending(io.RawIOBase):
    """A file object whose data is sent to a file on the head, in chunks. `entry` describes the sent file.

    The first error is kept in `failure`: if `write` raised it, torch would raise its own error instead.
    """

    def __init__(self, keeper: Any, name: str) -> None:
        import xxhash

        super().__init__()
        self.failure: Exception | None = None
        self._keeper, self._name = keeper, name
        self._hasher, self._size = xxhash.xxh3_128(), 0
        self._waiting: deque[Any] = deque()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Send a chunk of the data, after a wait if two chunks are in transit. Return the length of the sent chunk."""
        if len(self._waiting) == _UNDERWAY:
            self._await_oldest()
        chunk = bytes(memoryview(data).cast("B")[:CHUNK_BYTES])
        self._hasher.update(chunk)
        if self.failure is None:
            self._waiting.append(self._keeper.write.remote(self._name, self._size, chunk))
        self._size += len(chunk)
        return len(chunk)

    def close(self) -> None:
        """Wait for chunks in transit: the head must not write while the file is removed or sent again."""
        if not self.closed and not self._size:
            self.write(b"")  # creates an empty file on the head
        while self._waiting:
            self._await_oldest()
        super().close()

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self._name, self._size, self._hasher.hexdigest())

    def _await_oldest(self) -> None:
        try:
            _result(self._waiting.popleft())
        except Exception as error:  # noqa: BLE001 - whatever it is, `_sending` raises it
            self.failure = self.failure or error


def disk_of(keeper: Any, root: Path) -> RunDisk:
    """Return the disk of the run at `root` for this actor: if the node does not see it, the head's through `keeper`."""
    if keeper is None or os.environ.get(DISKS_VARIABLE) != "private":
        return RunDisk()
    # Each driver (a Ray job) has its own folder: an earlier driver may have left a half-fetched, outdated checkpoint.
    folder = Path(tempfile.gettempdir()) / f"hpc-grpo-disk-{ray.get_runtime_context().get_job_id()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for leftover in folder.parent.glob("hpc-grpo-disk-*"):
        if leftover != folder:
            shutil.rmtree(leftover, ignore_errors=True)
    return HeadDisk(keeper, root, folder)


@contextmanager
def _locked(path: Path, how: int) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)  # an outline has no read permission
    try:
        fcntl.flock(descriptor, how)
        yield descriptor
    finally:
        os.close(descriptor)


def _result(reference: Any) -> Any:
    """Return the result of a call to the keeper. Raises the keeper's own exception."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise error.cause from None
