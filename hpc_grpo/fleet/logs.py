"""Jobs' logs as the controller keeps them: logs/JOB/ATTEMPT.log, and logs/JOB.log for the newest attempt."""

from __future__ import annotations

import os
from pathlib import Path

from hpc_grpo.fleet.messages import AttemptKey, AttemptSeen, file_name


class JobLogs:
    """Writes what visits bring, each byte at its own offset: to fetch a piece twice changes nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, job_id: str, attempt: int | None = None) -> Path:
        """Return the log of an attempt, by default of the newest one that has any."""
        name = file_name(job_id)
        return self._folder / f"{name}.log" if attempt is None else self._folder / name / f"{attempt}.log"

    def size(self, key: AttemptKey) -> int:
        try:
            return self.path(*key).stat().st_size
        except FileNotFoundError:
            return 0

    def add(self, seen: AttemptSeen, offset: int) -> bool:
        """Write a piece of a log that begins at `offset`; returns whether the log is whole as far as the VM has it."""
        path = self.path(*seen.key)
        if seen.log:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(descriptor, seen.log, offset)
            finally:
                os.close(descriptor)
            if offset == 0:
                self._point_to(seen.key)
        return self.size(seen.key) >= seen.log_size

    def _point_to(self, key: AttemptKey) -> None:
        link = self.path(key.job_id)
        target = Path(file_name(key.job_id)) / f"{key.attempt}.log"
        if link.is_symlink() and int(link.readlink().stem) > key.attempt:  # an older attempt's log comes late
            return
        beside = link.with_name(f".{link.name}.{os.getpid()}")
        beside.unlink(missing_ok=True)
        beside.symlink_to(target)
        beside.replace(link)


def tail(path: Path, num_lines: int, num_bytes: int = 1 << 20) -> tuple[int, str]:
    """Return the size of a log and its last lines, of the last `num_bytes`; (0, "") where there is none."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - num_bytes))
            lines = file.read().decode(errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return 0, ""
    return size, "".join(lines[-num_lines:] if num_lines else [])


def read_from(path: Path, offset: int) -> bytes:
    """Return what a log has from `offset` on; nothing where there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:
        return b""
