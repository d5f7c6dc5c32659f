"""Two programs prove to each other over a new connection that both know a token, before they say anything else.

    listener -> caller    nonce of the listener
    caller   -> listener  nonce of the caller, HMAC-SHA256(token, purpose, "caller", both nonces)
    listener -> caller    HMAC-SHA256(token, purpose, "listener", both nonces), or REFUSAL

The challenge of `multiprocessing.connection`, made mutual. The role is signed, so no side's answer serves the other.
Messages have a fixed length: nothing that a stranger says is parsed. Both nonces are new: a recorded handshake proves
nothing. The token is never sent. Pure functions, for the gate of nodes that join and the reward server.
"""

from __future__ import annotations

import hmac
import os
from collections import Counter
from collections.abc import Sequence

NONCE_BYTES = 32
PROOF_BYTES = 32
REFUSAL = bytes(PROOF_BYTES)
"""What a listener says to a caller that does not know the token."""


LEAST_TOKEN_LENGTH = 16
MOST_OF_ADDRESS = 32
"""Callers of one address that have not proved the token."""
MOST_UNPROVED = 256
"""Callers of all addresses that have not proved the token."""


def crowded(addresses: Sequence[str], address: str) -> str | None:
    """Return the address of which a caller must go before one of `address` comes, None where there is room.

    `addresses` are those of callers without a proof. Hang up on any of them, not on the oldest: that would always be an
    honest caller, whose proof takes longest.
    """
    per_address = Counter(addresses)
    if len(addresses) >= MOST_UNPROVED:
        return per_address.most_common(1)[0][0]
    return address if per_address[address] >= MOST_OF_ADDRESS else None


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def proof(token: bytes, purpose: bytes, role: bytes, listener_nonce: bytes, caller_nonce: bytes) -> bytes:
    return hmac.digest(token, purpose + role + listener_nonce + caller_nonce, "sha256")


def answer(token: bytes, purpose: bytes, listener_nonce: bytes) -> tuple[bytes, bytes]:
    """Return what a caller says to a listener's nonce, and what a listener that knows the token answers."""
    own = new_nonce()
    said = own + proof(token, purpose, b"caller", listener_nonce, own)
    return said, proof(token, purpose, b"listener", listener_nonce, own)


def judge(token: bytes, purpose: bytes, listener_nonce: bytes, said: bytes) -> bytes:
    """Return a listener's proof to a caller that has `said` this, REFUSAL where the caller does not know the token."""
    caller_nonce, proved = said[:NONCE_BYTES], said[NONCE_BYTES:]
    if not hmac.compare_digest(proved, proof(token, purpose, b"caller", listener_nonce, caller_nonce)):
        return REFUSAL
    return proof(token, purpose, b"listener", listener_nonce, caller_nonce)


def is_same(said: bytes, expected: bytes) -> bool:
    """Compare two proofs in a time that tells nothing about them."""
    return hmac.compare_digest(said, expected)
