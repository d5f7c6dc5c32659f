"""A server that rewards ask, started beside the head and ended with the attempt: `launch.reward_server`."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from hpc_grpo.config.launch import RewardServerConfig
from hpc_grpo.errors import NodesUnavailableError
from hpc_grpo.launch.environment.rules import is_denied
from hpc_grpo.system.processes import die_with_parent
from hpc_grpo.system.say import say

_ASK_EVERY_S = 0.5
_ANSWER_S = 5.0
_AGAIN_S = 2.0
_TAIL_LINES = 12


class RewardServer:
    """The running server; its output is in `log`. One that dies is started again: rewards that ask it wait for it."""

    def __init__(self, asked: RewardServerConfig, log: Path, cwd: Path) -> None:
        self._asked, self._log, self._cwd = asked, log, cwd
        self._start()

    def wait_until_healthy(self, goes_on: Callable[[], bool]) -> bool:
        """Return True once it answers, False where waiting does not go on.

        Raises NodesUnavailableError with the end of its log where it ends or never answers.
        """
        begun = time.monotonic()
        while not self._answers():
            waited_s = time.monotonic() - begun
            if self._process.poll() is not None:
                self._fail(f"ended with exit code {self._process.returncode} before it answered")
            if not goes_on():
                return False
            if waited_s > self._asked.deadline_s:
                self._fail(f"did not answer at {self._asked.health_url} within {waited_s:.0f} s")
            time.sleep(_ASK_EVERY_S)
        say(f"The reward server answers at {self._asked.health_url} ({time.monotonic() - begun:.1f} s).")
        return True

    def keep_alive(self) -> None:
        """Start it again where it has died, but not at every turn."""
        if self._process.poll() is not None and time.monotonic() - self._started_at > _AGAIN_S:
            say(f"The reward server ended with {self._process.returncode}; starting it again. Its log: {self._log}")
            self._start()

    def _start(self) -> None:
        environ = {name: value for name, value in os.environ.items() if not is_denied(name)}
        self._started_at = time.monotonic()
        with self._log.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    self._asked.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environ,
                    cwd=self._cwd,
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                )
            except OSError as error:
                raise NodesUnavailableError(
                    f"launch.reward_server.command: {self._asked.command[0]} cannot be run ({error.strerror})."
                ) from error

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self._asked.health_url, timeout=_ANSWER_S):
                return True
        except urllib.error.HTTPError as error:
            return error.code < 500  # it is there, and wants a token, say
        except (OSError, ValueError):
            return False

    def _fail(self, how: str) -> None:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise NodesUnavailableError(
            f"The reward server {how}; training has not begun. {self._log} ends with:\n{tail or '(it said nothing)'}"
        )
