"""A person at a terminal of the login node: types into a shell, reads what it prints, presses Ctrl+C."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

CTRL_C = "\x03"

_POLL_S = 0.1
_EXIT_DEADLINE_S = 30.0


class Terminal:
    """A command on the login node with a terminal of its own; hung up when left.

    Home is `cwd`, so that its shells run none of the startup files of this machine's user: one that is hung up in
    the midst of them may leave a lock that every later shell waits for.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], repository: Path, cwd: Path) -> None:
        # Found from any folder without PYTHONPATH, which the shell would inherit.
        start = (
            f"import sys; sys.path.insert(0, {str(repository)!r})\n"
            "from tools.virtual_slurm.__main__ import main; sys.exit(main())"
        )
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", sys.executable, "-c", start, "exec", "--", *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "dumb", "HOME": str(cwd), **environment},
            cwd=cwd,
        )
        os.close(slave)
        self._printed = bytearray()
        self._seen = 0
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.type("exit")
        try:
            self._process.wait(_EXIT_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._master)

    @property
    def text(self) -> str:
        """All it has shown so far."""
        return self._printed.decode(errors="replace").replace("\r", "")

    def await_prompt(self, deadline_s: float) -> None:
        """A shell that starts throws away what was typed before."""
        self.expect(r"[#$] $", deadline_s)

    def type(self, line: str) -> None:
        self.press(f"{line}\n")

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def ask(self, line: str, pattern: str, deadline_s: float) -> re.Match[str]:
        """Type `line` until it shows `pattern`: srun may throw away what is typed just after the first prompt."""
        end = time.monotonic() + deadline_s
        while True:
            self.type(line)
            left_s = end - time.monotonic()
            try:
                return self.expect(pattern, min(10.0, left_s))
            except AssertionError:
                if left_s <= 10.0 or self._process.poll() is not None:
                    raise

    def expect(self, pattern: str, deadline_s: float) -> re.Match[str]:
        """Wait until it shows `pattern` after what was expected before."""
        end = time.monotonic() + deadline_s
        while (found := re.compile(pattern, re.MULTILINE).search(self.text, self._seen)) is None:
            if time.monotonic() > end or self._process.poll() is not None:
                raise AssertionError(f"{pattern!r} was not shown in {deadline_s:.0f} s:\n{self.text}")
            time.sleep(_POLL_S)
        self._seen = found.end()
        return found

    def _read(self) -> None:
        while True:
            try:
                read = os.read(self._master, 4096)
            except OSError:  # nobody has the terminal open any more
                return
            self._printed += read
