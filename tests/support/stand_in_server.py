"""A server on loopback whose answers a test gives."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]
Serve = Callable[[Callable[[str, Any], Reply]], "StandIn"]


class StandIn(ThreadingHTTPServer):
    """A server whose answers a function of the test's gives; `requests` has what it was asked."""

    daemon_threads = True

    def __init__(self, answer: Callable[[str, Any], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.requests: list[tuple[str, Any, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        size = int(self.headers.get("Content-Length", "0"))
        body = json.loads(self.rfile.read(size)) if size else None
        self.server.requests.append((self.path, body, self.headers.get("Authorization")))
        status, content = self.server.answer(self.path, body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    do_POST = do_GET  # noqa: N815

    def log_message(self, *arguments: Any) -> None:
        """Write no line for each request."""


@contextmanager
def serving() -> Iterator[Serve]:
    """Give a function that starts servers, which end with the block."""
    servers: list[StandIn] = []

    def start(answer: Callable[[str, Any], Reply]) -> StandIn:
        servers.append(StandIn(answer))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
