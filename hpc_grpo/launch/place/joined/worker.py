"""The worker: dials the head, runs a node agent on the connection, and dials again until the run ends.

Keeps nothing between two connections, so either side may restart. After a signal its agent tears down, and the head
receives the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

from hpc_grpo import __version__
from hpc_grpo.errors import EXIT_COMPLETE, EXIT_RESUMABLE, ConfigError
from hpc_grpo.launch.place.joined.connection import (
    LEFT,
    TOKEN_VARIABLE,
    Hello,
    NotProvedError,
    find_token,
    notice_cuts,
    prove_to_head,
    read_order,
)
from hpc_grpo.launch.place.joined.place import HEAD_VARIABLE, member
from hpc_grpo.launch.place.joined.roles import interface_of, node_name
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.source import SUMS
from hpc_grpo.system.process_tree import descendants, end_processes
from hpc_grpo.system.processes import boot_id, pid_namespace
from hpc_grpo.system.say import say
from hpc_grpo.system.signals import end_signals

_REDIAL_S = 1.0
_SAY_AGAIN_S = 30.0
_DIAL_S = 5.0
_MOST_REFUSALS, _MOST_REFUSALS_OF_FILE = 5, 90
"""Refused tokens in a row, a second apart, after which the worker gives up.

A restarted head writes another token to the run's file, which a network file system may show a minute later.
"""


class _ToldError(Exception):
    """A signal asks this worker to end."""


@dataclass
class Worker:
    """One node's part in a run with its head elsewhere. `head`: its name or address. `is_over`: no head will come."""

    run: RunDir
    head: str
    port: int
    is_over: Callable[[], bool]
    name: str = field(default_factory=node_name)
    _told: str = ""
    _connection: socket.socket | None = None  # the running agent's
    _said: str = ""
    _said_at: float = 0.0

    def serve(self) -> int:
        """Serve until the head says that the run has ended, or a signal comes. Return the exit code."""
        taken = [signal.SIGINT, *end_signals()]
        for number in taken:
            signal.signal(number, self._on_signal)
        try:
            with member(self.run, f"worker-{self.name}"):
                return self._serve()
        except _ToldError:
            say(f"{self._told} ended this worker; nothing of the run is left on {self.name}.")
            return EXIT_RESUMABLE
        finally:  # this process ends next, with its own exit code
            for number in taken:
                signal.signal(number, signal.SIG_IGN)

    def _serve(self) -> int:
        refusals = 0
        while not self.is_over():
            try:
                connection = self._dial()
                refusals = 0
            except NotProvedError as error:
                connection, refusals = None, refusals + 1
                if refusals >= (_MOST_REFUSALS if os.environ.get(TOKEN_VARIABLE) else _MOST_REFUSALS_OF_FILE):
                    raise ConfigError(
                        f"{self.head}:{self.port} does not let this worker in: {error}. Export the head's "
                        f"{TOKEN_VARIABLE} here, or unset it on nodes that share the run directory {self.run.path}."
                    ) from error
            if connection is not None and (code := self._serve_connection(connection)) is not None:
                return code
            time.sleep(_REDIAL_S)
        say(f"The run in {self.run.path} is complete.")
        return EXIT_COMPLETE

    def _dial(self) -> socket.socket | None:
        """Return a connection on which both sides have proved the token; None if there is none yet."""
        token = find_token(self.run.join_token, os.environ)
        if token is None:
            self._progress(f"Waiting for the run's token: start the head, or export {TOKEN_VARIABLE} on all nodes.")
            return None
        try:
            connection = socket.create_connection((self.head, self.port), timeout=_DIAL_S)
        except OSError as error:
            self._progress(f"Waiting for the head at {self.head}:{self.port} ({error.strerror or error}).")
            return None
        try:
            prove_to_head(connection, token)
            notice_cuts(connection)
            identity = f"{boot_id()}/{pid_namespace()}/{self.name}"
            interface = interface_of(connection.getsockname()[0])
            connection.sendall(Hello(self.name, identity, __version__, interface).to_line())
        except (OSError, EOFError) as error:
            connection.close()
            self._progress(f"The head at {self.head}:{self.port} closed the connection ({error}).")
            return None
        except NotProvedError:
            connection.close()
            raise
        self._said = ""
        say(f"{self.name} has joined the head at {self.head}:{self.port}.")
        return connection

    def _serve_connection(self, connection: socket.socket) -> int | None:
        """Follow the head's orders on one connection. Return the exit code, None to dial again."""
        try:
            order = read_order(connection)
            if order is None:
                say("The head is gone; dialing again.")
            elif "ended" in order:
                say(f"The run is over ({order['ended']}): {order['why']}")
                return int(order["code"])
            else:
                self._run_agent(connection, list(order["run"]))
                say("The agent on this node has ended; dialing the head again.")
            return None
        finally:
            connection.close()
            if self._told:
                raise _ToldError

    def _run_agent(self, connection: socket.socket, words: list[str]) -> None:
        """Run a module of hpc-grpo, with the connection as its stdin and stdout, until it ends."""
        if words[:1] != ["-m"] or not words[1].startswith("hpc_grpo."):
            raise ConfigError(f"The head asks for {words!r}, which a head of this version never does.")
        copy = [str(self.run.source_dir)] if (self.run.source_dir / SUMS).is_file() else []
        kept = {name: value for name, value in os.environ.items() if name not in (TOKEN_VARIABLE, HEAD_VARIABLE)}
        command = [sys.executable, "-E", *copy, *words]
        self._connection = connection
        try:
            # In its own session: Ctrl+C reaches only this process, which lets the agent tear down in order.
            agent = subprocess.Popen(
                command, stdin=connection.fileno(), stdout=connection.fileno(), env=kept, start_new_session=True
            )
            if self._told:  # a signal came while the agent started
                self._leave(connection)
            agent.wait()
        finally:
            self._connection = None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """End this worker. A running agent tears down first; a second signal does not wait for it."""
        is_second, self._told = bool(self._told), signal.Signals(number).name
        if self._connection is None:
            raise _ToldError
        if is_second:
            end_processes(lambda: descendants(os.getpid()), 0.0)
        else:
            self._leave(self._connection)

    def _leave(self, connection: socket.socket) -> None:
        """Send the head the reason in a NodeReport, and end the agent by closing its stdin."""
        say(f"{self._told}: tearing down on {self.name}.")
        left = {"event": "failed", "node": self.name, "why": f"{self._told} {LEFT}"}
        with contextlib.suppress(OSError):
            connection.send(json.dumps(left).encode() + b"\n")
            connection.shutdown(socket.SHUT_RD)

    def _progress(self, text: str) -> None:
        """Print what the worker waits for: at each change, and every 30 s."""
        if text != self._said or time.monotonic() - self._said_at > _SAY_AGAIN_S:
            self._said, self._said_at = text, time.monotonic()
            say(text)
