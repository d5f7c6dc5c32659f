"""The reward server: hosts rewards over HTTP for the reward `remote`, on a node with what they need.

Runs in a process of its own, `hpc-grpo reward-server`; requests are scored by a pool like a grader's. It waits for
requests, and serves nobody without its token: rewards execute code, and prompts are nobody else's to read.
"""

from __future__ import annotations

import hmac
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hpc_grpo.errors import RewardError
from hpc_grpo.grading.pool import RewardPool

MAX_BODY_BYTES = 64 << 20


class RewardServer(ThreadingHTTPServer):
    """Serves `POST /score` and `GET /health`, each request in a thread that waits for the pool."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], pool: RewardPool, token: str) -> None:
        super().__init__(address, _Handler)
        self.pool = pool
        self.token = token


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 300
    server: RewardServer

    def do_GET(self) -> None:
        if self._is_allowed():
            self._answer(*((200, {"status": "ok"}) if self.path == "/health" else (404, {"error": "no such path"})))

    def do_POST(self) -> None:
        if not self._is_allowed():
            return
        try:
            size = int(self.headers.get("Content-Length", ""))
            if not 0 <= size <= MAX_BODY_BYTES:
                raise ValueError(f"a body has 0 to {MAX_BODY_BYTES} bytes")
            groups = _groups(json.loads(self.rfile.read(size)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.close_connection = True
            self._answer(400, {"error": f"{type(error).__name__}: {error}"})
            return
        self._answer(*self._scored(groups))

    def _scored(self, groups: list[tuple[str, list[str], dict[str, Any]]]) -> tuple[int, dict[str, Any]]:
        """Score groups; 422 where a reward fails, which asking again would not mend."""
        try:
            outcomes = [outcome.result() for outcome in [self.server.pool.submit(*group) for group in groups]]
        except RewardError as error:
            return 422, {"error": str(error)}
        if errors := [error for outcome in outcomes for error in outcome.errors]:
            return 422, {"error": "\n".join(errors)}
        return 200, {"scores": [score for outcome in outcomes for score in outcome.rewards]}

    def _is_allowed(self) -> bool:
        given = self.headers.get("Authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            return True
        self.close_connection = True  # its body is not read
        self._answer(401, {"error": "the token is missing or wrong"})
        return False

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for each request."""


def _groups(body: Any) -> list[tuple[str, list[str], dict[str, Any]]]:
    """Cut a request into runs of one prompt and one item, as the pool takes them. Raises ValueError and its like."""
    prompts, completions, fields = body["prompts"], body["completions"], body.get("fields", {})
    if not all(isinstance(text, str) for text in [*prompts, *completions]) or len(prompts) != len(completions):
        raise ValueError("prompts and completions are lists of texts of one length")
    if any(len(values) != len(completions) for values in fields.values()):
        raise ValueError("each of fields is a list with one value per completion")
    groups: list[tuple[str, list[str], dict[str, Any]]] = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        item = {name: values[index] for name, values in fields.items()}
        if groups and groups[-1][0] == prompt and groups[-1][2] == item:
            groups[-1][1].append(completion)
        else:
            groups.append((prompt, [completion], item))
    return groups
