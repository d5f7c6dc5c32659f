"""Following the logs of a run as they grow, from one attempt to the next."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpc_grpo.report.logs import attempt_dir, attempt_dirs, log_files, tail_and_end
from hpc_grpo.report.records import read_records
from hpc_grpo.report.standing import is_over
from hpc_grpo.run.paths import RunDir

POLL_S = 0.5
_READ_BYTES = 1 << 20


class GrowingFile:
    """Text that is appended to a file; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def skip_to_tail(self, num_lines: int) -> str:
        """The last lines that are there now; `read` goes on behind them."""
        text, self._offset = tail_and_end(self.path, num_lines)
        return text

    def read(self) -> str:
        """What came since the last call, at most 1 MiB of it."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_READ_BYTES)
        except FileNotFoundError:
            return ""
        self._offset += len(data)
        return self._decoder.decode(data)


class LogFollower:
    """The logs of one attempt or, with `attempt` None, of the newest and of every one after it.

    `node` names the node whose logs are meant; None means the driver's. A node that an attempt does not have ends
    with ConfigError for the first attempt, and is waited for in later ones.
    """

    def __init__(self, run: RunDir, *, node: str | None, attempt: int | None, num_lines: int) -> None:
        self._run, self._node, self._fixed = run, node, attempt
        self._number = 0
        self._files: list[GrowingFile] = []
        self._said_last: Path | None = None
        self._start = ""
        if (folder := attempt_dir(run, attempt)) is not None:
            self._open(folder)
            self._start = "".join(self._headed(file, file.skip_to_tail(num_lines)) for file in self._files)

    def read(self) -> str:
        """What the logs gained since the last call; goes over to the next attempt once there is nothing more."""
        text, self._start = self._start, ""
        while True:
            text += "".join(self._headed(file, file.read()) for file in self._files)
            if text or not self._open_next():
                return text

    def is_over(self) -> bool:
        """Whether the logs cannot grow any more: call it before the last `read`."""
        records, now = read_records(self._run), time.time()
        if self._fixed is None or is_over(records, now):
            return is_over(records, now)
        mine = [attempt for attempt in records.attempts if attempt.attempt == self._fixed]
        return bool(mine) and not records.is_running(mine[0], now)

    def _open(self, folder: Path) -> None:
        self._number = int(folder.name.split("-")[0])
        self._files = [GrowingFile(path) for path in log_files(folder, self._node)]

    def _open_next(self) -> bool:
        if self._fixed is not None:
            return False
        for number, folder in attempt_dirs(self._run).items():
            has_logs = self._node is None or (folder / "nodes" / self._node).is_dir()
            if number > self._number and has_logs:
                self._open(folder)
                return True
        return False

    def _headed(self, file: GrowingFile, text: str) -> str:
        """Say whose text it is where it changes."""
        if not text or file.path == self._said_last:
            return text
        gap = "" if self._said_last is None else "\n"
        self._said_last = file.path
        return f"{gap}==> {file.path.relative_to(self._run.path)} <==\n{text}"


def follow(follower: LogFollower, sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Text as it comes, until no more can."""
    while True:
        over = follower.is_over()
        while text := follower.read():
            yield text
        if over:
            return
        sleep(POLL_S)
