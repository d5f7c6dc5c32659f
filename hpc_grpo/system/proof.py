"""Two programs prove to each other over a new connection that both know a token, before any other data.

    listener -> caller    nonce of the listener
    caller   -> listener  nonce of the caller, HMAC-SHA256(token, purpose, "caller", both nonces)
    listener -> caller    HMAC-SHA256(token, purpose, "listener", both nonces), or REFUSAL

This is the challenge of `multiprocessing.connection`, made mutual. The role is signed, so one side's answer is useless
for the other side. Messages have a fixed length, so no stranger's data is parsed. Both nonces are new, so a recorded
handshake proves nothing. The token is never sent. Pure functions, for the gate of nodes that join and the reward
server.
"""

from __future__ import annotations

import hmac
import os
from collections import Counter
from collections.abc import Sequence

NONCE_BYTES = 32
PROOF_BYTES = 32
REFUSAL = bytes(PROOF_BYTES)
"""The listener's answer to a caller that does not know the token."""


LEAST_TOKEN_LENGTH = 16
MOST_OF_ADDRESS = 32
"""Limit of callers from one address that have not proved the token."""
MOST_UNPROVED = 256
"""Callers of all addresses that have not proved the token."""


def crowded(addresses: Sequence[str], address: str) -> str | None:
    """Return the address of a caller to hang up on, before accepting one of `address`; None if there is room.

    `addresses` are those of callers without a proof. Hang up on any of them, not on the oldest: an honest caller with a
    slow proof would always be the oldest.
    """
    per_address = Counter(addresses)
    if len(addresses) >= MOST_UNPROVED:
        return per_address.most_common(1)[0][0]
    return address if per_address[address] >= MOST_OF_ADDRESS else None


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
