"""The handshake of a worker and the head (system/proof.py), and the run's token that it proves.

The head begins with MAGIC. The connection is authenticated when it opens; what follows is neither encrypted nor signed.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.files import write_atomic
from hpc_grpo.run.owner import make_private_dir
from hpc_grpo.system.proof import LEAST_TOKEN_LENGTH, NONCE_BYTES, PROOF_BYTES, REFUSAL, answer, is_same

TOKEN_VARIABLE = "HPC_GRPO_TOKEN"
MAGIC = b"hpc-grpo join 1\n"
HANDSHAKE_S = 10.0
"""A peer that has not proved itself after so long is hung up on."""

_USER_TIMEOUT_S = 30
"""Data that the other side has not acknowledged for so long mean that it is cut off."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


class NotProvedError(Exception):
    """The other side did not prove that it knows the token."""


def prove_to_head(connection: socket.socket, token: bytes) -> None:
    """Do the worker's part. Raises NotProvedError where the head does not know the token, or does not take ours.

    Raises EOFError where the head hangs up without a word: it has no place for this worker at the moment.
    """
    connection.settimeout(HANDSHAKE_S)
    challenge = read_exactly(connection, len(MAGIC) + NONCE_BYTES)
    if not challenge.startswith(MAGIC):
        raise NotProvedError("who listens there is no head of hpc-grpo")
    said, expected = answer(token, MAGIC, challenge[len(MAGIC) :])
    connection.sendall(said)
    answered = read_exactly(connection, PROOF_BYTES)
    if answered == REFUSAL:
        raise NotProvedError("the head refuses it: its token is another one")
    if not is_same(answered, expected):
        raise NotProvedError("the head does not know the token of this run")
    connection.settimeout(None)


def read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Return so many bytes, and take no more. Raises EOFError where the connection ends before, TimeoutError."""
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise EOFError("the connection ended")
        data += part
    return data


def notice_cuts(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other side is cut off or gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_S * 1000)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def make_token(file: Path, environ: Mapping[str, str], *, anew: bool = True) -> bytes:
    """Return the head's token: of the environment, else of the run's file; `anew` replaces that one."""
    keeps = not anew or bool(environ.get(TOKEN_VARIABLE, "").strip())
    if keeps and (found := find_token(file, environ)) is not None:
        return found
    make_private_dir(file.parent)
    write_atomic(file, secrets.token_hex(32), mode=0o600)
    return file.read_bytes().strip()


def find_token(file: Path, environ: Mapping[str, str]) -> bytes | None:
    """Return the token that the environment or the run has; None: neither, yet. Raises ConfigError for a short one."""
    if given := environ.get(TOKEN_VARIABLE, "").strip():
        if len(given) < LEAST_TOKEN_LENGTH:
            raise ConfigError(
                f"{TOKEN_VARIABLE} has {len(given)} characters and must have {LEAST_TOKEN_LENGTH} at least: whoever "
                f"guesses it runs code as you. Make one, and give it to every node: openssl rand -hex 32"
            )
        return given.encode()
    return file.read_bytes().strip() if file.is_file() else None
