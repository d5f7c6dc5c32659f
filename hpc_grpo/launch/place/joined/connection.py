"""A worker's connection as the head holds it: the stdin and stdout of a node agent on the other side."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable
from typing import IO

from hpc_grpo.launch.place.base import LOST_CODE

LEFT = "ended its worker"
"""The last words of an agent whose worker was told to end."""


class _Sending:
    """The way to the agent: closing it is the end of its stdin, while what it still says can be read."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.closed = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)


class JoinedProcess:
    """A program of a worker's behind its connection, as a NodeConnection. It has ended once the connection has."""

    def __init__(self, connection: socket.socket, node: str, log: IO[bytes], on_end: Callable[[], None]) -> None:
        self._connection, self._node, self._on_end = connection, node, on_end
        self._log = os.dup(log.fileno())  # the caller closes its own
        self.stdin: IO[bytes] | None = _Sending(connection)  # type: ignore[assignment]
        self.stdout: IO[bytes] | None = connection  # type: ignore[assignment]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return LOST_CODE once everything that it said was read, and nothing more can come."""
        if self.returncode is None:
            try:
                if self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return None
                self._end("was closed")
            except BlockingIOError:
                return None
            except OSError as error:
                self._end(f"broke ({error.strerror})")
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([self._node], timeout or 0.0)
            time.sleep(0.05)
        return LOST_CODE

    def send_signal(self, sig: int, /) -> None:
        """Do nothing: the end of its stdin reaches an agent, a signal of ours would only reach a client."""

    def terminate(self) -> None:
        """Hang up: the agent tears down by itself."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    kill = terminate

    def _end(self, how: str) -> None:
        self.returncode = LOST_CODE
        with contextlib.suppress(OSError):
            os.write(self._log, f"the connection of {self._node} {how}\n".encode())
        os.close(self._log)
        self._on_end()
