"""The gate of the head: one port that workers dial, and the connections of workers that have proved the token.

A thread accepts, checks and keeps the connections of waiting workers, so they may come and go at any time. A caller
without the token learns nothing, has ten seconds, and shares a few places with others of its address.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hpc_grpo.errors import NodesUnavailableError
from hpc_grpo.launch.place.joined.connection import HANDSHAKE_S, MAGIC, Hello, farewell, notice_cuts
from hpc_grpo.system.proof import NONCE_BYTES, PROOF_BYTES, REFUSAL, crowded, judge
from hpc_grpo.system.say import say

_MOST_NAMED = 1000
_MOST_HELLO_BYTES = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TURN_S = 0.25


@dataclass
class _Caller:
    """A connection whose other side has not identified itself."""

    connection: socket.socket
    address: str
    since: float = field(default_factory=time.monotonic)
    nonce: bytes = field(default_factory=lambda: os.urandom(NONCE_BYTES))
    said: bytes = b""
    is_proved: bool = False


class Gate:
    """The head's port, from its construction to `close`. Raises NodesUnavailableError if the port is taken.

    `make_token` is called once the port is the head's. No worker gets the head's `own_name`.
    """

    def __init__(self, port: int, make_token: Callable[[], bytes], version: str, own_name: str) -> None:
        self._version, self._own_name = version, own_name
        try:
            self._listener = socket.create_server(("", port), backlog=128)
        except OSError as error:
            raise NodesUnavailableError(
                f"launch.port = {port}: workers cannot dial it here ({error.strerror}). Is another head running on "
                f"{socket.gethostname()}, or another Ray? Give all nodes another port: launch.port=N, or RAY_HEAD_PORT."
            ) from error
        self._token = make_token()
        self.port: int = self._listener.getsockname()[1]
        self._callers: list[_Caller] = []
        self._waiting: dict[str, tuple[Hello, socket.socket]] = {}
        self._given: dict[str, str] = {}
        self._farewell = b""
        self._told: set[str] = set()
        self._named: set[str] = set()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="gate", daemon=True)
        self._thread.start()

    def waiting(self) -> dict[str, Hello]:
        """Return the workers that wait, by name and in the order of their names."""
        with self._lock:
            return {name: self._waiting[name][0] for name in sorted(self._waiting)}

    def own_address(self) -> str | None:
        """Return this machine's address that a waiting worker has dialed."""
        with self._lock:
            connection = next((connection for _, connection in self._waiting.values()), None)
            return None if connection is None else str(connection.getsockname()[0])

    def take(self, name: str) -> socket.socket | None:
        """Return the connection of a waiting worker, and hand it over. None if the worker is gone."""
        with self._lock:
            hello, connection = self._waiting.pop(name, (None, None))
            if hello is not None:
                self._given[name] = hello.identity
        return connection

    def say_farewell(self, line: bytes, names: Iterable[str], deadline_s: float) -> None:
        """Send a last line to all waiting workers, and to each that dials, until those of `names` have it or time is
        up.
        """
        with self._lock:
            self._farewell = line
            for name in [*self._waiting]:
                self._tell(name, self._waiting.pop(name)[1])
        deadline = time.monotonic() + deadline_s
        while not self._told.issuperset(names) and time.monotonic() < deadline:
            time.sleep(_TURN_S / 2)

    def close(self) -> None:
        """Hang up on all that wait, and listen no longer."""
        self._is_closed.set()
        self._thread.join()
        self._listener.close()
        self._hang_up_on([*self._callers])
        for _hello, connection in self._waiting.values():
            connection.close()

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            with self._lock:
                idle = {connection.fileno(): name for name, (_, connection) in self._waiting.items()}
            callers = {caller.connection.fileno(): caller for caller in self._callers}
            poll = select.poll()
            for descriptor in (self._listener.fileno(), *callers, *idle):
                poll.register(descriptor, select.POLLIN)
            for descriptor, _event in poll.poll(_TURN_S * 1000):
                if descriptor in callers:
                    self._hear(callers[descriptor])
                elif descriptor in idle:  # A waiting worker is gone: a waiting worker sends nothing.
                    with self._lock:
                        found = self._waiting.get(idle[descriptor])
                        if found is not None and found[1].fileno() == descriptor:
                            del self._waiting[idle[descriptor]]
                            found[1].close()
                else:
                    self._accept()
            self._hang_up_on(caller for caller in [*self._callers] if time.monotonic() - caller.since > HANDSHAKE_S)

    def _accept(self) -> None:
        try:
            connection, (address, *_) = self._listener.accept()
        except OSError:  # The caller has left; or too many files are open, which the callers' deadlines solve.
            time.sleep(_TURN_S)
            return
        connection.setblocking(False)
        unproved = [caller for caller in self._callers if not caller.is_proved]
        if (full := crowded([caller.address for caller in unproved], address)) is not None:  # of this address, or all
            self._hang_up_on([random.choice([caller for caller in unproved if caller.address == full])])
        caller = _Caller(connection, address)
        self._callers.append(caller)
        self._send(caller, MAGIC + caller.nonce)

    def _hear(self, caller: _Caller) -> None:
        """Read a caller's data: first its proof, then its hello."""
        expected = NONCE_BYTES + PROOF_BYTES if not caller.is_proved else _MOST_HELLO_BYTES
        try:
            data = caller.connection.recv(expected - len(caller.said))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.said += data
        if not data or len(caller.said) >= _MOST_HELLO_BYTES:
            self._hang_up_on([caller])
        elif not caller.is_proved and len(caller.said) == expected:
            answer = judge(self._token, MAGIC, caller.nonce, caller.said)
            caller.is_proved, caller.said = answer != REFUSAL, b""
            self._send(caller, answer)
            if not caller.is_proved:
                if caller.address not in self._named and len(self._named) < _MOST_NAMED:
                    self._named.add(caller.address)
                    say(f"Hung up on {caller.address}, which does not know the token of this run.")
                self._hang_up_on([caller])
        elif caller.is_proved and caller.said.endswith(b"\n"):
            self._let_in(caller)

    def _let_in(self, caller: _Caller) -> None:
        """Let a worker wait under its name. A second worker of that name gets a number behind it."""
        try:
            hello = Hello.from_line(caller.said)
        except ValueError:
            self._hang_up_on([caller])
            return
        refusal = ""
        if not _NAME.fullmatch(hello.name):
            refusal = f"The name {hello.name!r} cannot be a node's: letters, digits, '.', '_' and '-', 63 at most."
        elif hello.version != self._version:
            refusal = f"The head has hpc-grpo {self._version}, this worker {hello.version}: install one on all nodes."
        if refusal:
            self._send(caller, farewell("config", 78, refusal))
            self._hang_up_on([caller])
            return
        self._callers.remove(caller)
        notice_cuts(caller.connection)
        with self._lock:
            held = {name: known.identity for name, (known, _) in self._waiting.items()}
            held = {**self._given, **held, self._own_name: ""}
            number, name = 1, hello.name
            while held.get(name, hello.identity) != hello.identity:
                number += 1
                name = f"{hello.name}-{number}"
            if self._farewell:
                self._tell(name, caller.connection)
                return
            if before := self._waiting.pop(name, None):
                before[1].close()
            self._waiting[name] = (hello, caller.connection)

    def forget(self, name: str) -> None:
        """Free the name of a worker whose connection has ended."""
        with self._lock:
            self._given.pop(name, None)

    def _tell(self, name: str, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.send(self._farewell)
            self._told.add(name)
        connection.close()

    def _send(self, caller: _Caller, data: bytes) -> None:
        try:
            caller.connection.send(data)  # a few bytes, into an empty buffer
        except OSError:
            self._hang_up_on([caller])

    def _hang_up_on(self, callers: Iterable[_Caller]) -> None:
        for caller in callers:
            if caller in self._callers:
                self._callers.remove(caller)
            caller.connection.close()
