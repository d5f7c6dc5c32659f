"""A worker's connection to the head: the proof of the token, the lines after the proof, and the worker's agent.

system/proof.py has the handshake; the head begins it with MAGIC. Later data are neither encrypted nor signed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter

from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.place.base import LOST_CODE
from hpc_grpo.run.files import write_atomic
from hpc_grpo.run.owner import make_private_dir
from hpc_grpo.system.proof import LEAST_TOKEN_LENGTH, NONCE_BYTES, PROOF_BYTES, REFUSAL, answer, judge, read_exactly

TOKEN_VARIABLE = "HPC_GRPO_TOKEN"
MAGIC = b"hpc-grpo join 1\n"
HANDSHAKE_S = 10.0
"""Time limit of a handshake and the following hello. A slower connection is closed."""

_MOST_LINE_BYTES = 65536
_USER_TIMEOUT_S = 30  # Seconds without acknowledgement of sent data after which the other side counts as gone.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


class NotProvedError(Exception):
    """The other side did not prove that it knows the token."""


def prove_to_head(connection: socket.socket, token: bytes) -> None:
    """Do the worker's part of the handshake. Raises NotProvedError if the head does not know or refuses our token.

    Raises EOFError if the head closes the connection at once: it has no place for this worker now.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    challenge = read_exactly(connection, len(MAGIC) + NONCE_BYTES, deadline)
    if not challenge.startswith(MAGIC):
        raise NotProvedError("the listener there is no head of hpc-grpo")
    said, expected = answer(token, MAGIC, challenge[len(MAGIC) :])
    connection.sendall(said)
    answered = read_exactly(connection, PROOF_BYTES, deadline)
    if answered == REFUSAL:
        raise NotProvedError("the head refuses it: the head has another token")
    if not hmac.compare_digest(answered, expected):
        raise NotProvedError("the head does not know the token of this run")
    connection.settimeout(None)


def prove_to_worker(connection: socket.socket, token: bytes, deadline: float) -> bool:
    """Do the head's part of the handshake. Return whether the worker knows the token.

    Raises EOFError and OSError if the worker leaves, and TimeoutError after the deadline.
    """
    nonce = os.urandom(NONCE_BYTES)
    connection.sendall(MAGIC + nonce)
    proof = judge(token, MAGIC, nonce, read_exactly(connection, NONCE_BYTES + PROOF_BYTES, deadline))
    connection.sendall(proof)
    return proof != REFUSAL


def read_line(connection: socket.socket, most_bytes: int, deadline: float | None = None) -> bytes:
    """Read one line and no byte after it. Raises EOFError if the connection ends, or the line is too long.

    `deadline` as in `read_exactly`.
    """
    line = b""
    while not line.endswith(b"\n"):
        if len(line) == most_bytes:
            raise EOFError(f"a line has more than {most_bytes} bytes")
        line += read_exactly(connection, 1, deadline)
    return line


def how_ended(connection: socket.socket) -> str:
    """Return how a connection has ended; "" while it is open, or has unread data."""
    try:
        return "" if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) else "was closed"
    except BlockingIOError:
        return ""
    except OSError as error:
        return f"broke ({error.strerror})"


def notice_cuts(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other side is cut off or gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_S * 1000)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def make_token(file: Path, environ: Mapping[str, str], *, anew: bool = True) -> bytes:
    """Return the head's token: from the environment, else from the run's file.

    Writes a new token to the file if neither has a token, or if `anew` and the environment has none.
    """
    keeps = not anew or bool(environ.get(TOKEN_VARIABLE, "").strip())
    if keeps and (found := find_token(file, environ)) is not None:
        return found
    make_private_dir(file.parent)
    write_atomic(file, secrets.token_hex(32), mode=0o600)
    return file.read_bytes().strip()


def find_token(file: Path, environ: Mapping[str, str]) -> bytes | None:
    """Return the token of the environment or the run; None if there is none yet. Raises ConfigError for a short one."""
    if given := environ.get(TOKEN_VARIABLE, "").strip():
        if len(given) < LEAST_TOKEN_LENGTH:
            raise ConfigError(
                f"{TOKEN_VARIABLE} has {len(given)} characters and must have {LEAST_TOKEN_LENGTH} at least: whoever "
                f"guesses it runs code as you. Make one, and give it to every node: openssl rand -hex 32"
            )
        return given.encode()
    return file.read_bytes().strip() if file.is_file() else None


@dataclass(frozen=True)
class Hello:
    """A worker's description of itself, after it has proved the token.

    `identity` distinguishes workers of the same name. `interface` is its connection's, None for loopback.
    """

    name: str
    identity: str
    version: str
    interface: str | None = None

    @classmethod
    def from_line(cls, line: bytes) -> Hello:
        """Parse a worker's description of itself. Raises ValueError for other text."""
        return TypeAdapter(cls).validate_json(line, strict=True)

    def to_line(self) -> bytes:
        return json.dumps(self.__dict__).encode() + b"\n"


def farewell(kind: str, code: int, why: str) -> bytes:
    """Return the head's last line to a worker, which then ends."""
    return json.dumps({"ended": kind, "code": code, "why": why}).encode() + b"\n"


def read_order(connection: socket.socket) -> dict[str, Any] | None:
    """Read the head's line, and no byte after it. Return None if the head is gone."""
    try:
        return dict(json.loads(read_line(connection, _MOST_LINE_BYTES)))
    except (OSError, EOFError):
        return None


LEFT = "ended its worker"
"""An agent's last message, if its worker was told to end."""


class _Sending:
    """The stream to the agent. Closing it ends the agent's stdin, while its output can still be read."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)


class JoinedProcess:
    """A worker's agent, as a NodeConnection. `poll` sees only the connection."""

    def __init__(self, connection: socket.socket, node: str, log: IO[bytes], on_end: Callable[[], None]) -> None:
        self._connection, self._node, self._on_end = connection, node, on_end
        self._log = os.dup(log.fileno())  # the caller closes its own
        self.stdin: IO[bytes] | None = _Sending(connection)  # type: ignore[assignment]
        self.stdout: IO[bytes] | None = connection  # type: ignore[assignment]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return LOST_CODE once the connection has ended and all its data were read; None before."""
        if self.returncode is None and (how := how_ended(self._connection)):
            self.returncode = LOST_CODE
            with contextlib.suppress(OSError):
                os.write(self._log, f"the connection of {self._node} {how}\n".encode())
            os.close(self._log)
            self._on_end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([self._node], timeout or 0.0)
            time.sleep(0.05)
        return LOST_CODE

    def send_signal(self, sig: int, /) -> None:
        """Do nothing. The end of stdin reaches an agent; a signal would only reach a client."""

    def terminate(self) -> None:
        """Close the connection. The agent then tears down."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """Close the connection and drop its unread data, because `poll` waits for unread data."""
        self.terminate()
        with contextlib.suppress(OSError):
            while self._connection.recv(65536):
                pass
