"""Two programs prove to each other over a new connection that both know a token, before any other data.

    listener -> caller    nonce of the listener
    caller   -> listener  nonce of the caller, HMAC-SHA256(token, purpose, "caller", both nonces)
    listener -> caller    HMAC-SHA256(token, purpose, "listener", both nonces), or REFUSAL

This is the challenge of `multiprocessing.connection`, made mutual. The role is signed, so one side's answer is useless
for the other side. Messages have a fixed length, so no stranger's data is parsed. Both nonces are new, so a recorded
handshake proves nothing. The token is never sent. The listener for joining nodes and the reward server are a
`ProvedServer`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import random
import socket
import socketserver
import threading
import time
from collections import Counter
from typing import Any

NONCE_BYTES = 32
PROOF_BYTES = 32
REFUSAL = bytes(PROOF_BYTES)
"""The listener's answer to a caller that does not know the token."""

LEAST_TOKEN_LENGTH = 16
MOST_OF_ADDRESS = 32
"""Limit of callers from one address that have not proved the token."""
MOST_UNPROVED = 256
"""Limit of callers from all addresses that have not proved the token."""


def proof(token: bytes, purpose: bytes, role: bytes, listener_nonce: bytes, caller_nonce: bytes) -> bytes:
    return hmac.digest(token, purpose + role + listener_nonce + caller_nonce, "sha256")


def answer(token: bytes, purpose: bytes, listener_nonce: bytes) -> tuple[bytes, bytes]:
    """Return a caller's answer to the listener's nonce, and the expected reply of a listener that knows the token."""
    own = os.urandom(NONCE_BYTES)
    said = own + proof(token, purpose, b"caller", listener_nonce, own)
    return said, proof(token, purpose, b"listener", listener_nonce, own)


def judge(token: bytes, purpose: bytes, listener_nonce: bytes, said: bytes) -> bytes:
    """Return a listener's proof for a caller's answer, or REFUSAL if the caller does not know the token."""
    caller_nonce, proved = said[:NONCE_BYTES], said[NONCE_BYTES:]
    if not hmac.compare_digest(proved, proof(token, purpose, b"caller", listener_nonce, caller_nonce)):
        return REFUSAL
    return proof(token, purpose, b"listener", listener_nonce, caller_nonce)


def read_exactly(connection: socket.socket, num_bytes: int, deadline: float | None = None) -> bytes:
    """Read exactly `num_bytes`. Raises EOFError if the connection ends before, and TimeoutError.

    `deadline` is a time of `time.monotonic()`. Default: the timeout of the connection, for each read.
    """
    data = b""
    while len(data) < num_bytes:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise EOFError("the connection ended")
        data += part
    return data


class ProvedServer(socketserver.ThreadingTCPServer):
    """Serves each connection in a thread.

    Connections that have not proved the token share a few places: idle strangers cannot use up the threads. The handler
    calls `leave_unproved` after the proof.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], handler: type[socketserver.BaseRequestHandler]) -> None:
        self.unproved: dict[socket.socket, str] = {}
        self._places = threading.Lock()
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Give a new connection a place, and return True. If all places are taken, first close another connection.

        Closes a random one, not the oldest: an honest caller with a slow proof would always be the oldest.
        """
        address = str(client_address[0])
        with self._places:
            per_address = Counter(self.unproved.values())
            full = address if per_address[address] >= MOST_OF_ADDRESS else None
            if len(self.unproved) >= MOST_UNPROVED:
                full = per_address.most_common(1)[0][0]
            if full is not None:
                gone = random.choice([one for one, its in self.unproved.items() if its == full])
                del self.unproved[gone]
                with contextlib.suppress(OSError):  # the caller has hung up by itself
                    gone.shutdown(socket.SHUT_RDWR)  # the connection's thread then closes it
            self.unproved[request] = address
        return True

    def leave_unproved(self, request: Any) -> None:
        with self._places:
            self.unproved.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.leave_unproved(request)
        super().shutdown_request(request)
