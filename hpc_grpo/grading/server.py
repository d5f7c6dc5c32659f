"""The reward server: hosts rewards over HTTP for the reward `remote`, on a node with their dependencies.

Runs in its own process, `hpc-grpo reward serve`; a pool like a grader's scores the requests. It serves only callers
that prove that they know its token, because rewards execute code and prompts are private. A caller begins with MAGIC,
both sides prove that they know the token (system/proof.py), and requests follow on that connection.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import time
from functools import partial
from http.server import BaseHTTPRequestHandler
from itertools import groupby
from typing import Any

from hpc_grpo.errors import RewardError
from hpc_grpo.grading.pool import RewardPool
from hpc_grpo.rewards import Group
from hpc_grpo.rewards.proved import MAGIC
from hpc_grpo.system.proof import NONCE_BYTES, PROOF_BYTES, REFUSAL, ProvedServer, judge, read_exactly

MAX_BODY_BYTES = 64 << 20
_HANDSHAKE_S, _REQUEST_S = 10.0, 300.0


class RewardServer(ProvedServer):
    """Serves `POST /score` and `GET /health`, each connection in a thread that waits for the pool."""

    def __init__(self, address: tuple[str, int], pool: RewardPool, token: str) -> None:
        super().__init__(address, _Handler)
        self.pool, self.token = pool, token.encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RewardServer
    is_proved = False

    def handle(self) -> None:
        read = partial(read_exactly, self.connection, deadline=time.monotonic() + _HANDSHAKE_S)
        with contextlib.suppress(OSError, EOFError):  # the caller has disconnected, or is late
            if (begin := read(1)) == MAGIC[:1]:
                if begin + read(len(MAGIC) - 1) != MAGIC:
                    return
                nonce = os.urandom(NONCE_BYTES)
                self.wfile.write(nonce)
                answer = judge(self.server.token, MAGIC, nonce, read(NONCE_BYTES + PROOF_BYTES))
                self.wfile.write(answer)
                if answer == REFUSAL:
                    return
                self.is_proved = True
                self.server.leave_unproved(self.connection)
                self.connection.settimeout(_REQUEST_S)
            else:  # a request without a proof, which is refused whatever follows
                self.rfile = io.BytesIO(begin + self.connection.recv(io.DEFAULT_BUFFER_SIZE))
            super().handle()

    def do_GET(self) -> None:
        if self._is_allowed():
            self._answer(*((200, {"status": "ok"}) if self.path == "/health" else (404, {"error": "no such path"})))

    def do_POST(self) -> None:
        """Score groups. Status 422: a reward failed, and a retry would fail too. Status 503: rewards were too slow."""
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
        try:
            submit = self.server.pool.submit
            waiting = [submit(own.prompt, own.completions, own.fields, images=own.images) for own in groups]
            outcomes = [pending.result() for pending in waiting]
            failed = [outcome for outcome in outcomes if outcome.errors]
            errors = [error for outcome in failed for error in outcome.errors]
            status = 503 if all(outcome.timed_out for outcome in failed) else 422
        except RewardError as error:
            errors, status = [str(error)], 422
        if errors:
            self._answer(status, {"error": "\n".join(errors)})
        else:
            scores = [score for outcome in outcomes for score in outcome.rewards]
            lost = [reason for outcome in outcomes for reason in outcome.over_budget]
            self._answer(200, {"scores": scores, "over_budget": lost})

    def _is_allowed(self) -> bool:
        if not self.is_proved:
            self.close_connection = True  # the request's body is not read
            self._answer(401, {"error": "prove the token: name its variable in rewards.N.args.token_env of `remote`"})
        return self.is_proved

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log line for each request."""


def _groups(body: Any) -> list[Group]:
    """Return a group for each run of rows with equal prompt and item. Raises ValueError and similar errors."""
    prompts, completions, fields = body["prompts"], body["completions"], body.get("fields", {})
    if not all(isinstance(text, str) for text in [*prompts, *completions]) or len(prompts) != len(completions):
        raise ValueError("prompts and completions are lists of texts of one length")
    if any(len(values) != len(completions) for values in fields.values()):
        raise ValueError("each of fields is a list with one value per completion")
    images = tuple(base64.b64decode(image, validate=True) for image in body.get("images", ()))
    items = [{name: values[index] for name, values in fields.items()} for index in range(len(prompts))]
    runs = groupby(zip(prompts, items, completions, strict=True), key=lambda row: row[:2])
    return [Group(prompt, tuple(row[2] for row in run), item, images=images) for (prompt, item), run in runs]
