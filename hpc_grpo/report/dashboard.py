"""Serve the page of runs, live, to one user on the loopback.

    GET /                        the page without data; it takes the token from its address, after the #
    GET /api/runs                all runs in the root: their `status`, and a version that changes with the files
    GET /api/run?run=NAME        the page's data of a run; without its held-out prompts for &evals=THEIR_VERSION
    GET /api/rollouts?run=&step= the rollouts of a step

All users of a machine share its loopback, and any web page may send requests to it. Each call therefore needs the
token, and a Host header that does not name loopback is refused. Files are read only during a request.
"""

from __future__ import annotations

import contextlib
import gzip
import hmac
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hpc_grpo.errors import ConfigError
from hpc_grpo.report.page import MOST_ROLLOUT_BYTES, clean, judge_of, make_page, run_data
from hpc_grpo.report.samples import read_groups, rollout_files
from hpc_grpo.report.status import read_records, summarize
from hpc_grpo.run.files import digest_of
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import MetricColumns
from hpc_grpo.system.readable import printable

_FIRST_PORT, _NUM_PORTS, _TRIED_PORTS = 8000, 1900, 20
_KEPT_RUNS = 8
_OWN_NAMES = ("127.0.0.1", "localhost")


class Dashboard(ThreadingHTTPServer):
    """The server. `runs` returns the current runs. `port` None: this user's own port, or the next free one."""

    daemon_threads = True

    def __init__(self, runs: Callable[[], list[RunDir]], port: int | None = None) -> None:
        self.token = secrets.token_urlsafe(32)
        self._runs = runs
        self._columns = lru_cache(_KEPT_RUNS)(lambda run: MetricColumns(run.metrics))
        self._lock = threading.Lock()
        first = _FIRST_PORT + os.getuid() % _NUM_PORTS
        ports = range(first, first + _TRIED_PORTS) if port is None else (port,)
        for number in ports:
            try:
                super().__init__(("127.0.0.1", number), _Handler)
                return
            except OSError as error:
                refused = error
        raise ConfigError(f"No port of {ports[0]} to {ports[-1]} is free ({refused.strerror}): name one with --port.")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/#token={self.token}"

    def answer(self, path: str, query: Mapping[str, str]) -> Any:
        """Return the answer to a call. Raises LookupError if it does not exist."""
        found = {printable(run.name): run for run in self._runs()}
        if path == "/api/runs":
            return [self._summary(run) for run in found.values()]
        run = found[query["run"]]
        if path == "/api/run":
            with self._lock:  # only one thread at a time may extend the columns
                data = run_data(run, run.name, self._columns(run), time.time())
            data["eval_version"] = digest_of(data["held_out"])
            return data if query.get("evals") != data["eval_version"] else {**data, "held_out": None}
        if path == "/api/rollouts":
            step = int(query["step"])
            return clean(read_groups(rollout_files(run, [step])[step], judge_of(run), MOST_ROLLOUT_BYTES))
        raise LookupError(path)

    def _summary(self, run: RunDir) -> dict[str, Any]:
        summary = summarize(read_records(run), time.time())
        files = (run.metrics, run.state, run.config, run.chain, run.attempts, run.rollouts(0).parent)
        stamps = []
        for path in files:
            with contextlib.suppress(OSError):
                stamps.append(((stat := path.stat()).st_mtime_ns, stat.st_size))
        version = digest_of(json.dumps([summary.state, summary.problem, summary.attempt, stamps]))
        return dict(clean({**asdict(summary), "name": run.name, "version": version}))


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        if (urlsplit(f"//{self.headers.get('Host', '')}").hostname or "") not in _OWN_NAMES:
            return self._send(403, "text/plain", b"This dashboard answers only to localhost.\n")
        asked = urlsplit(self.path)
        if asked.path == "/":
            page = make_page({"live": True, "runs": []}, connect="'self'")
            return self._send(200, "text/html; charset=utf-8", page.encode())
        shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(shown.encode(), self.server.token.encode()):
            return self._send(403, "text/plain", b"The token is missing or wrong.\n")
        try:
            values = self.server.answer(asked.path, {key: own[0] for key, own in parse_qs(asked.query).items()})
        except (LookupError, ValueError, FileNotFoundError):  # a step's file may be removed during the read
            return self._send(404, "text/plain", b"Not found.\n")
        except OSError as error:
            return self._send(500, "text/plain", f"{error}\n".encode(errors="replace"))
        return self._send(200, "application/json", json.dumps(values, ensure_ascii=False, allow_nan=False).encode())

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        headers = {
            "Content-Type": content_type,
            "Cache-Control": "no-store",
            "Content-Security-Policy": "frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        if len(body) > 1000 and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        with contextlib.suppress(ConnectionError):  # the caller has disconnected
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a request every two seconds would fill the terminal."""


def ssh_line(port: int, environ: Mapping[str, str]) -> str:
    """Return the command that reaches the port from the user's machine; "" without an ssh connection.

    Uses the address of the user's connection: a login node's name leads to a different node each time.

    >>> ssh_line(8000, {"SSH_CONNECTION": "10.0.0.9 52044 10.0.0.1 22", "USER": "ada"})
    'ssh -N -L 8000:127.0.0.1:8000 ada@10.0.0.1'
    """
    parts = environ.get("SSH_CONNECTION", "").split()
    if len(parts) != 4:
        return ""
    user, other = environ.get("USER", ""), "" if parts[3] == "22" else f"-p {parts[3]} "
    return f"ssh -N -L {port}:127.0.0.1:{port} {other}{user}{'@' if user else ''}{parts[2]}"
