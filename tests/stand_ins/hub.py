"""A Hugging Face hub on loopback: the part of its HTTP interface that huggingface_hub and datasets read.

    with StandInHub([HubRepo("models", "org/tiny", {"config.json": b"{}"})]) as hub:
        os.environ["HF_ENDPOINT"] = hub.url

As on the hub, a gated repository lists its files and refuses them without a token.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c" * 40


@dataclass(frozen=True)
class HubRepo:
    """`kind` is models or datasets; `files` maps paths to contents; a `token` must be sent for the files."""

    kind: str
    name: str
    files: dict[str, bytes]
    token: str | None = None


class StandInHub:
    """`requests` holds METHOD PATH of everything that was asked, in order."""

    def __init__(self, repos: Iterable[HubRepo]) -> None:
        self.repos = {(repo.kind, repo.name): repo for repo in repos}
        self.requests: list[str] = []
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> StandInHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"")

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the tests read `requests`."""

    def _answer(self, body: bytes) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        words = path.strip("/").split("/")
        if words[0] == "api" and len(words) >= 4:
            self._describe(words[1], "/".join(words[2:4]), words[4:], body)
        elif "resolve" in words:
            at = words.index("resolve")
            kind, owner = (words[0], words[1:at]) if words[0] == "datasets" else ("models", words[:at])
            self._resolve(kind, "/".join(owner), "/".join(words[at + 2 :]))
        else:
            self._refuse(404, "EntryNotFound")

    def _describe(self, kind: str, name: str, rest: list[str], body: bytes) -> None:
        repo = self.hub.repos.get((kind, name))
        if repo is None:
            self._refuse(404, "RepoNotFound")
        elif rest[:1] == ["tree"]:
            self._send_json([entry for entry in map(_file, repo.files.items()) if _is_below(entry, rest[2:])])
        elif rest[:1] == ["paths-info"]:
            self._send_json([_file((path, repo.files[path])) for path in _paths(body) if path in repo.files])
        elif rest[:1] in ([], ["revision"]):
            siblings = [{"rfilename": path} for path in repo.files]
            self._send_json({"id": name, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []})
        else:
            self._refuse(404, "EntryNotFound")

    def _resolve(self, kind: str, name: str, path: str) -> None:
        repo = self.hub.repos.get((kind, name))
        if repo is None:
            self._refuse(404, "RepoNotFound")
        elif repo.token is not None and self.headers.get("Authorization") != f"Bearer {repo.token}":
            self._refuse(401, "GatedRepo")
        elif path not in repo.files:
            self._refuse(404, "EntryNotFound")
        else:
            self._send(200, repo.files[path], {"ETag": f'"{_hash(repo.files[path])}"', "X-Repo-Commit": COMMIT})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Repo-Commit": COMMIT} if code else {})

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _file(entry: tuple[str, bytes]) -> dict[str, Any]:
    path, content = entry
    return {"type": "file", "path": path, "size": len(content), "oid": _hash(content)}


def _is_below(entry: dict[str, Any], folder: list[str]) -> bool:
    return not folder or str(entry["path"]).startswith("/".join(folder) + "/")


def _paths(body: bytes) -> list[str]:
    """paths-info comes as JSON or as a form."""
    if body.startswith(b"{"):
        return list(json.loads(body)["paths"])
    return parse_qs(body.decode())["paths"]


def _hash(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
