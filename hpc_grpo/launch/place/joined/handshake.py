"""Prove the run's token over a new connection, each side to the other, before anything else is said on it.

    head   -> worker   MAGIC, nonce of the head
    worker -> head     nonce of the worker, HMAC-SHA256(token, "worker", both nonces)
    head   -> worker   HMAC-SHA256(token, "head", both nonces)

The challenge of `multiprocessing.connection`, made mutual and with the roles in what is signed, so that no side's
answer serves the other one. Messages are of fixed length: nothing that a stranger says is ever parsed, and a recorded
handshake proves nothing, since both nonces are new. The token is never sent.

The connection is authenticated when it opens; what follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.files import write_atomic
from hpc_grpo.run.owner import make_private_dir

TOKEN_VARIABLE = "HPC_GRPO_TOKEN"
MAGIC = b"hpc-grpo join 1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
HANDSHAKE_S = 10.0
"""A peer that has not proved itself after so long is hung up on."""

_LEAST_TOKEN_LENGTH = 16
_USER_TIMEOUT_S = 30
"""Data that the other side has not acknowledged for so long mean that it is cut off."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


class NotProvedError(Exception):
    """The other side did not prove that it knows the token."""


def proof(token: bytes, role: bytes, head_nonce: bytes, worker_nonce: bytes) -> bytes:
    return hmac.digest(token, MAGIC + role + head_nonce + worker_nonce, "sha256")


def is_proof(said: bytes, token: bytes, role: bytes, head_nonce: bytes, worker_nonce: bytes) -> bool:
    return hmac.compare_digest(said, proof(token, role, head_nonce, worker_nonce))


def prove_to_head(connection: socket.socket, token: bytes) -> None:
    """Do the worker's part. Raises NotProvedError where the head does not know the token, or does not take ours."""
    connection.settimeout(HANDSHAKE_S)
    challenge = read_exactly(connection, len(MAGIC) + NONCE_BYTES)
    if not challenge.startswith(MAGIC):
        raise NotProvedError("who listens there is no head of hpc-grpo")
    head_nonce, worker_nonce = challenge[len(MAGIC) :], os.urandom(NONCE_BYTES)
    connection.sendall(worker_nonce + proof(token, b"worker", head_nonce, worker_nonce))
    try:
        answer = read_exactly(connection, PROOF_BYTES)
    except EOFError:
        raise NotProvedError("the head hung up: its token is another one") from None
    if not is_proof(answer, token, b"head", head_nonce, worker_nonce):
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


def make_token(file: Path, environ: Mapping[str, str]) -> bytes:
    """Return the head's token: of the environment, else of the run's file, which is made where it is missing."""
    if (token := find_token(file, environ)) is not None:
        return token
    make_private_dir(file.parent)
    write_atomic(file, secrets.token_hex(32), mode=0o600)
    return file.read_bytes().strip()


def find_token(file: Path, environ: Mapping[str, str]) -> bytes | None:
    """Return the token that the environment or the run has; None: neither, yet. Raises ConfigError for a short one."""
    if given := environ.get(TOKEN_VARIABLE, "").strip():
        if len(given) < _LEAST_TOKEN_LENGTH:
            raise ConfigError(
                f"{TOKEN_VARIABLE} has {len(given)} characters and must have {_LEAST_TOKEN_LENGTH} at least: whoever "
                f"guesses it runs code as you. Make one, and give it to every node: openssl rand -hex 32"
            )
        return given.encode()
    return file.read_bytes().strip() if file.is_file() else None
