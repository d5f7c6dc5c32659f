"""A server that rewards call. It starts on the head and ends with the attempt: `launch.reward_server`."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from hpc_grpo.config.launch import RewardServerConfig
from hpc_grpo.errors import NodesUnavailableError
from hpc_grpo.launch.agent.program import Program
from hpc_grpo.launch.environment import is_denied
from hpc_grpo.run.files import when_there_is_space
from hpc_grpo.system.process_tree import descendants, end_processes, holders, listeners, session_members
from hpc_grpo.system.say import say

_ASK_EVERY_S = 0.5
_ANSWER_S = 5.0
_AGAIN_S = 2.0
_TAIL_LINES = 12
_END_S = 1.0
_END_ORPHANS = """
while kill -0 -- "-$0"; do
  read -r -t 2 _
  (($? > 128)) && continue
  kill -TERM -- "-$0"
  sleep 5
  kill -KILL -- "-$0"
done 2> /dev/null
"""
"""Ends the process group $0 when its stdin closes. Exits once the group is empty."""
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RewardServer:
    """The running server, with its output in `log`. A dead server is restarted; rewards wait for it.

    The process on its port receives prompts and decides scores. So it must be a descendant of this process.
    """

    def __init__(self, asked: RewardServerConfig, deadline_s: float, log: Path, cwd: Path) -> None:
        self._asked, self._deadline_s, self._log, self._cwd = asked, deadline_s, log, cwd
        address = urlsplit(asked.health_url)
        self._port = address.port or (443 if address.scheme == "https" else 80)
        self._guard: subprocess.Popen[bytes] | None = None
        self._start()

    def wait_until_healthy(self, goes_on: Callable[[], bool]) -> bool:
        """Return True once the server answers, False once waiting must end. Raises NodesUnavailableError."""
        begun = time.monotonic()
        while not self._answers():
            self._refuse_others()
            waited_s = time.monotonic() - begun
            if self._process.poll() is not None:
                self._fail(f"ended with exit code {self._process.returncode} before it answered")
            if not goes_on():
                return False
            if waited_s > self._deadline_s:
                self._fail(
                    f"did not answer at {self._asked.health_url} within {waited_s:.0f} s (launch.bringup_deadline_s)"
                )
            time.sleep(_ASK_EVERY_S)
        self._refuse_others()
        say(f"The reward server answers at {self._asked.health_url} ({time.monotonic() - begun:.1f} s).")
        return True

    def keep_alive(self) -> None:
        """Restart a dead server, at most every 2 s, and kill its leftovers.

        Raises NodesUnavailableError if another process has the port, or the command cannot be run.
        """
        if self._process.poll() is not None and time.monotonic() - self._started_at > _AGAIN_S:
            say(f"The reward server ended with {self._process.returncode}; starting it again. Its log: {self._log}")
            end_processes(self._left, _END_S)
            self._refuse_others()
            self._start()

    def _left(self) -> list[int]:
        """Return the processes that the ended server left: children in its session, and those on its port."""
        below = descendants(os.getpid())
        session = set(session_members(self._process.pid))
        on_port = {pid for pids in holders(listeners(self._port), below).values() for pid in pids}
        return [pid for pid in below if pid in session | on_port]

    def _refuse_others(self) -> None:
        """Raise NodesUnavailableError if a process that is not below this one listens on the server's port."""
        before = self._others()
        still = self._others() if before else {}  # leaves out a socket whose process ended between two looks
        for user in (before[inode] for inode in before.keys() & still.keys()):
            whose = "another process of yours" if user == os.geteuid() else f"a process of user {user}"
            self._fail(
                f"cannot have port {self._port}: {whose} listens there, and would receive the rewards' requests. "
                f"Choose another port in launch.reward_server and in the reward's url"
            )

    def _others(self) -> dict[int, int]:
        """Return the port's sockets of other processes: inode -> user. Leaves out root's, which serve containers."""
        found = listeners(self._port)
        ours = holders(found, descendants(os.getpid())) if found else {}
        return {inode: user for inode, user in found.items() if not ours[inode] and (user != 0 or os.geteuid() == 0)}

    def _start(self) -> None:
        environ = {name: value for name, value in os.environ.items() if not is_denied(name)}
        self._started_at = time.monotonic()
        with when_there_is_space(lambda: self._log.open("ab"), self._log.name) as output:
            try:
                options = {"stdout": output, "stderr": subprocess.STDOUT, "cwd": self._cwd}
                self._process = Program(self._asked.command, environ, None, **options).process
                self._guard_workers()
            except OSError as error:
                raise NodesUnavailableError(
                    f"launch.reward_server.command: {self._asked.command[0]} cannot be run ({error.strerror})."
                ) from error

    def _guard_workers(self) -> None:
        """Start a guard that ends the server's workers if this process is killed: the kernel ends only the server."""
        if self._guard is not None:
            with self._guard as of_the_server_before:
                of_the_server_before.kill()
        words, pipe, nowhere = ["bash", "-c", _END_ORPHANS, str(self._process.pid)], subprocess.PIPE, subprocess.DEVNULL
        self._guard = subprocess.Popen(words, stdin=pipe, stdout=nowhere, stderr=nowhere, start_new_session=True)

    def _answers(self) -> bool:
        try:
            with _DIRECTLY.open(self._asked.health_url, timeout=_ANSWER_S):
                return True
        except urllib.error.HTTPError as error:
            return error.code < 500  # The server runs, and may need a token.
        except (OSError, ValueError):
            return False

    def _fail(self, how: str) -> None:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise NodesUnavailableError(f"The reward server {how}. {self._log} ends with:\n{tail or '(it said nothing)'}")
