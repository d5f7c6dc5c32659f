"""Connections to an `hpc-grpo reward serve`: each side proves the token before the first request (system/proof.py).

Another process on the server's port learns neither the token nor a prompt, and its answers are refused. The connection
goes directly to the server, because no proxy could forward the proof.
"""

from __future__ import annotations

import hmac
from typing import Any

import httpcore
import httpx

from hpc_grpo.system.proof import NONCE_BYTES, PROOF_BYTES, answer

MAGIC = b"hpc-grpo reward 1\n"
"""A caller sends this first. It is no HTTP request, because none begins with a lower-case letter."""


class ProvedTransport(httpx.AsyncHTTPTransport):
    """Sends requests over connections whose listener has proved the token."""

    def __init__(self, token: bytes) -> None:
        super().__init__(trust_env=False)
        self._pool = httpcore.AsyncConnectionPool(network_backend=_ProvedBackend(token))


class _ProvedBackend(httpcore.AnyIOBackend):
    def __init__(self, token: bytes) -> None:
        self._token = token

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *others: Any, **options: Any
    ) -> httpcore.AsyncNetworkStream:
        stream = await super().connect_tcp(host, port, timeout, *others, **options)
        try:
            await stream.write(MAGIC, timeout)
            said, expected = answer(self._token, MAGIC, await _read_exactly(stream, NONCE_BYTES, timeout))
            await stream.write(said, timeout)
            if not hmac.compare_digest(await _read_exactly(stream, PROOF_BYTES, timeout), expected):
                raise httpcore.ConnectError("the server has another token, or is not `hpc-grpo reward serve`")
        except BaseException:
            await stream.aclose()
            raise
        return stream


async def _read_exactly(stream: httpcore.AsyncNetworkStream, num_bytes: int, timeout: float | None) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = await stream.read(num_bytes - len(data), timeout)
        if not part:
            raise httpcore.ConnectError("the server closed the connection instead of proving the token")
        data += part
    return data
