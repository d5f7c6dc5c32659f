"""Find the logs of a run, print the end of one, and follow them as they grow from one attempt to the next."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpc_grpo.errors import ConfigError, nearest
from hpc_grpo.report.status import RunRecords, is_over, read_records
from hpc_grpo.run.paths import RunDir

DRIVER_LOG = "driver.log"
_MAX_TAIL_BYTES = 1 << 22
_MAX_READ_BYTES = 1 << 20
_POLL_S = 0.5


def attempt_dir(run: RunDir, number: int | None) -> Path | None:
    """Return an attempt's folder, or the newest's; None before the first. Raises ConfigError for an unknown number."""
    dirs = run.attempt_dirs()
    if number is None:
        return dirs[max(dirs)] if dirs else None
    if number not in dirs:
        known = ", ".join(map(str, dirs)) or "none"
        raise ConfigError(f"--attempt = {number} must be an attempt of the run {run.name}; it has: {known}.")
    return dirs[number]


def log_files(attempt: Path, node: str | None) -> list[Path]:
    """Return the log of an attempt's driver, or the logs of a node. Raises ConfigError for an unknown node."""
    if node is None:
        return [attempt / DRIVER_LOG]
    known = sorted(path.name for path in (attempt / "nodes").glob("*"))
    if node not in known:
        raise ConfigError(
            f"--node = {node!r} must be a node of attempt {attempt.name}; it has: {', '.join(known) or 'none'}"
            f"{nearest(node, known)}"
        )
    return [attempt / "nodes" / node / name for name in ("agent.log", "ray_start.log")]


def ray_logs(attempt: Path, node: str) -> list[Path]:
    """Return the kept part of a node's Ray logs. Its agent copies them when the attempt ends."""
    return sorted(path for path in (attempt / "nodes" / node).glob("ray*/**/*") if path.is_file())


def is_of_an_actor(path: Path) -> bool:
    """Return whether a Ray log is the non-empty output of a learner, an engine or a grader."""
    return path.name.startswith("worker-") and path.suffix in (".err", ".out") and path.stat().st_size > 0


def why_no_attempt(records: RunRecords) -> str:
    """Return a text: no attempt has started. It names the output file of the job that will start one."""
    text, link = f"No attempt of run {records.run.name} has started yet.", records.unstarted_link
    return text if link is None else f"{text} Slurm's output of job {link.job_id}: {records.job_output(link.job_id)}"


def tail(path: Path, num_lines: int, max_bytes: int = _MAX_TAIL_BYTES) -> str:
    """Return the last lines of a file that may be huge. Reads at most `max_bytes`. "" without a file."""
    return tail_and_end(path, num_lines, max_bytes)[0]


def tail_and_end(path: Path, num_lines: int, max_bytes: int = _MAX_TAIL_BYTES) -> tuple[str, int]:
    """Return the last lines, and the offset in bytes after them; "" and 0 without a file."""
    try:
        with path.open("rb") as file:
            start = file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
            data = file.read(max_bytes)
    except FileNotFoundError:
        return "", 0
    lines = data.decode(errors="replace").split("\n")
    kept = num_lines + (lines[-1] == "")
    return "\n".join(lines[-kept:]) if num_lines else "", start + len(data)


class GrowingFile:
    """Follows the text appended to a file, which may not exist yet. Starts at the beginning or at the last lines."""

    def __init__(self, path: Path, num_lines: int | None) -> None:
        self.path = path
        self._start, self._offset = ("", 0) if num_lines is None else tail_and_end(path, num_lines)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """Return the new text since the last call, at most 1 MiB."""
        start, self._start = self._start, ""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_MAX_READ_BYTES)
        except FileNotFoundError:
            data = b""
        self._offset += len(data)
        return start + self._decoder.decode(data)


def follow(
    run: RunDir, *, node: str | None, attempt: int | None, num_lines: int, sleep: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """Yield the end of the driver's logs, or of `node`'s logs, and then new text, until they cannot grow any more.

    They are the logs of one attempt or, without `attempt`, of the newest and all later ones. Each file's path precedes
    its text. Raises ConfigError for a node that the first of these attempts lacks; in later ones, waits for the node.
    """
    number, files, shown = 0, list[GrowingFile](), Path()
    if (folder := attempt_dir(run, attempt)) is not None:
        number = int(folder.name.split("-")[0])
        files = [GrowingFile(path, num_lines) for path in log_files(folder, node)]
    while True:
        records, now = read_records(run), time.time()  # before the files are read, so no last line is missed
        ended = [each.attempt for each in records.attempts if not records.is_running(each, now)]
        over = is_over(records, now) or attempt in ended
        while True:
            gained = [(file.path, text) for file in files if (text := file.read())]
            for path, text in gained:
                gap = "\n" if shown.name else ""
                yield text if path == shown else f"{gap}==> {path.relative_to(run.path)} <==\n{text}"
                shown = path
            if gained:
                continue
            dirs = run.attempt_dirs().items() if attempt is None else ()
            later = ((n, own) for n, own in dirs if n > number and (node is None or (own / "nodes" / node).is_dir()))
            number, folder = next(later, (number, None))
            if folder is None:
                break
            files = [GrowingFile(path, None) for path in log_files(folder, node)]
        if over:
            return
        sleep(_POLL_S)
