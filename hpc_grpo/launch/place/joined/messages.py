"""The lines that head and worker exchange once both have proved the token: who a worker is, and what it is to do."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any

from hpc_grpo.launch.place.joined.handshake import read_exactly

_MOST_LINE_BYTES = 65536


@dataclass(frozen=True)
class Hello:
    """What a worker says of itself once it has proved the token. `identity` tells it from another of the same name.

    `interface`: that of its connection, None for loopback.
    """

    name: str
    identity: str
    num_cpus: int
    version: str
    interface: str | None = None

    @classmethod
    def from_line(cls, line: bytes) -> Hello:
        """Read what a worker says of itself. Raises ValueError for what is no such line."""
        try:
            hello = cls(**json.loads(line))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"no hello: {error}") from error
        texts = (hello.name, hello.identity, hello.version, hello.interface or "")
        if not all(isinstance(text, str) for text in texts) or not isinstance(hello.num_cpus, int):
            raise ValueError("a hello has texts and a number of cores")
        return hello

    def to_line(self) -> bytes:
        return json.dumps(self.__dict__).encode() + b"\n"


def farewell(kind: str, code: int, why: str) -> bytes:
    """Return the line that has a worker end."""
    return json.dumps({"ended": kind, "code": code, "why": why}).encode() + b"\n"


def read_order(connection: socket.socket) -> dict[str, Any] | None:
    """Return the line that the head sends, and take no byte of what follows; None where it is gone."""
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < _MOST_LINE_BYTES:
            line += read_exactly(connection, 1)
    except (OSError, EOFError):
        return None
    return dict(json.loads(line))
