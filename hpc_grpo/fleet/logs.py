"""The jobs' logs in the controller's folder: logs/JOB/ATTEMPT.log, and logs/JOB.log for the newest attempt."""

from __future__ import annotations

import os
from pathlib import Path

from hpc_grpo.fleet.messages import AttemptKey, AttemptSeen, file_name


class JobLogs:
    """Writes log pieces from visits, each at its offset: writing a piece twice changes nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, job_id: str, attempt: int | None = None) -> Path:
        """Return the path of an attempt's log; by default, of the newest attempt with a log."""
        name = file_name(job_id)
        return self._folder / f"{name}.log" if attempt is None else self._folder / name / f"{attempt}.log"

    def size(self, key: AttemptKey) -> int:
        path = self.path(*key)
        return path.stat().st_size if path.exists() else 0

    def add(self, seen: AttemptSeen, offset: int) -> bool:
        """Write a piece of a log that begins at `offset`. Return whether the controller now has all of the VM's log."""
        path = self.path(*seen.key)
        if seen.log:
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.seek(offset)
                file.write(seen.log)
            link = self.path(seen.key.job_id)
            # An older attempt's log may come after a newer one's.
            if offset == 0 and not (link.is_symlink() and int(link.readlink().stem) > seen.key.attempt):
                beside = link.with_name(f".{link.name}.{os.getpid()}")
                beside.unlink(missing_ok=True)
                beside.symlink_to(path.relative_to(self._folder))
                beside.replace(link)
        return self.size(seen.key) >= seen.log_size
