"""The gate of the head: one port that workers dial, and the connections of workers that have proved the token.

Threads check callers and let workers in, so workers may come and go at any time. A caller without the token learns
nothing. It has ten seconds for its proof and hello, and it shares a few connections with other callers of its address.
"""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from hpc_grpo.errors import EXIT_CONFIG, NodesUnavailableError
from hpc_grpo.launch.place.joined.connection import (
    HANDSHAKE_S,
    Hello,
    farewell,
    how_ended,
    notice_cuts,
    prove_to_worker,
    read_line,
)
from hpc_grpo.system.proof import ProvedServer
from hpc_grpo.system.say import say

_MOST_NAMED = 1000
_MOST_HELLO_BYTES = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TURN_S = 0.25


class Gate(ProvedServer):
    """The head's port, from its construction to `close`. Raises NodesUnavailableError if the port is taken.

    `make_token` is called once the port is the head's. No worker gets the head's `own_name`.
    """

    def __init__(self, port: int, make_token: Callable[[], bytes], version: str, own_name: str) -> None:
        self._version, self._own_name = version, own_name
        try:
            super().__init__(("", port), _Caller)
        except OSError as error:
            raise NodesUnavailableError(
                f"launch.port = {port}: workers cannot dial it here ({error.strerror}). Is another head running on "
                f"{socket.gethostname()}, or another Ray? Give all nodes another port: launch.port=N, or RAY_HEAD_PORT."
            ) from error
        self.token = make_token()
        self.port: int = self.server_address[1]
        self._waiting: dict[str, tuple[Hello, socket.socket]] = {}
        self._given: dict[str, str] = {}
        self._kept: set[socket.socket] = set()
        self._farewell = b""
        self._told: set[str] = set()
        self._named: set[str] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(_TURN_S,), name="gate", daemon=True).start()

    def waiting(self) -> dict[str, Hello]:
        """Return the workers that wait, by name and in the order of their names."""
        with self._lock:
            self._drop_left()
            return {name: self._waiting[name][0] for name in sorted(self._waiting)}

    def own_address(self) -> str | None:
        """Return this machine's address that a waiting worker has dialed; None if no worker waits."""
        with self._lock:
            connection = next((connection for _, connection in self._waiting.values()), None)
            return None if connection is None else str(connection.getsockname()[0])

    def take(self, name: str) -> socket.socket | None:
        """Hand over the connection of a waiting worker. None if the worker is gone."""
        with self._lock:
            self._drop_left()
            hello, connection = self._waiting.pop(name, (None, None))
            if hello is not None:
                self._given[name] = hello.identity
        return connection

    def say_farewell(self, line: bytes, names: Iterable[str], deadline_s: float) -> None:
        """Send a last line to each worker that waits or dials, until all of `names` have it or time is up."""
        with self._lock:
            self._farewell = line
            for name in [*self._waiting]:
                self._tell(name, self._waiting.pop(name)[1])
        deadline = time.monotonic() + deadline_s
        while not self._told.issuperset(names) and time.monotonic() < deadline:
            time.sleep(_TURN_S / 2)

    def close(self) -> None:
        """Close the port and all waiting connections."""
        self.shutdown()
        self.server_close()
        for connection in [*self.unproved, *(connection for _, connection in self._waiting.values())]:
            with contextlib.suppress(OSError):  # the worker has closed it
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def forget(self, name: str) -> None:
        """Free the name of a worker whose connection has ended."""
        with self._lock:
            self._given.pop(name, None)

    def note_stranger(self, address: str) -> None:
        """Print the address of a caller that does not know the token, once for each address."""
        with self._lock:
            is_new = address not in self._named and len(self._named) < _MOST_NAMED
            self._named |= {address} if is_new else set()
        if is_new:
            say(f"Refused {address}, which does not know the token of this run.")

    def let_in(self, connection: socket.socket, line: bytes) -> None:
        """Let a worker wait under its name, with a number if the name is taken.

        Refuses a bad name and another version of this package. Raises ValueError if `line` is no hello.
        """
        hello, refusal = Hello.from_line(line), ""
        if not _NAME.fullmatch(hello.name):
            refusal = f"The name {hello.name!r} cannot be a node's: letters, digits, '.', '_' and '-', 63 at most."
        elif hello.version != self._version:
            refusal = f"The head has hpc-grpo {self._version}, not {hello.version}: install the head's version here."
        if refusal:
            connection.sendall(farewell("config", EXIT_CONFIG, refusal))
            return
        notice_cuts(connection)
        connection.setblocking(False)
        with self._lock:
            self._drop_left()
            held = {name: known.identity for name, (known, _) in self._waiting.items()}
            held = {**self._given, **held, self._own_name: ""}
            number, name = 1, hello.name
            while held.get(name, hello.identity) != hello.identity:
                number += 1
                name = f"{hello.name}-{number}"
            self._kept.add(connection)
            if self._farewell:
                self._tell(name, connection)
                return
            if before := self._waiting.pop(name, None):
                before[1].close()
            self._waiting[name] = (hello, connection)

    def shutdown_request(self, request: Any) -> None:
        """Close the connection of a caller that was not let in."""
        with self._lock:
            was_let_in = request in self._kept
            self._kept.discard(request)
        if not was_let_in:
            super().shutdown_request(request)

    def _drop_left(self) -> None:
        """Forget waiting workers whose connections have ended. The caller holds the lock."""
        for name, (_, connection) in [*self._waiting.items()]:
            if how_ended(connection):
                del self._waiting[name]
                connection.close()

    def _tell(self, name: str, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.send(self._farewell)
            self._told.add(name)
        connection.close()


class _Caller(socketserver.BaseRequestHandler):
    """Handles a caller in a thread: first its proof, then its hello."""

    server: Gate

    def handle(self) -> None:
        gate, connection, deadline = self.server, self.request, time.monotonic() + HANDSHAKE_S
        with contextlib.suppress(OSError, EOFError, ValueError):  # the caller has left, is late, or sends no hello
            if prove_to_worker(connection, gate.token, deadline):
                gate.leave_unproved(connection)
                gate.let_in(connection, read_line(connection, _MOST_HELLO_BYTES, deadline))
            else:
                gate.note_stranger(self.client_address[0])
