"""Programs of another user of this machine, for what a run must keep from one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534
_PYTHON = "/usr/bin/python3"


def need_second_user() -> None:
    """Skip the test where this process may not become another user; in CI, where a skip would go unseen, fail."""
    if os.getuid() == 0:
        return
    why = "a program of another user: root alone may start one"
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


def give_to_second_user(path: Path) -> None:
    need_second_user()
    os.chown(path, NOBODY, NOBODY)


@contextmanager
def as_second_user(program: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program as another user, once it has printed a line; kill it at the end of the block."""
    need_second_user()
    python = _PYTHON if Path(_PYTHON).exists() else sys.executable
    process = subprocess.Popen(
        [python, "-c", program, *words], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", text=True,
        stdout=subprocess.PIPE, env={"PATH": os.defpath},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() != "", "it ended at once"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


LISTENER = """
import http.server, socket, sys, threading
heard = open(sys.argv[2], "ab", buffering=0) if sys.argv[2:] else sys.stdout.buffer
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(server.getsockname()[1], flush=True)
ok = b'HTTP/1.1 200 OK\\r\\nContent-Length: 16\\r\\nConnection: close\\r\\n\\r\\n{"scores":[1.0]}'
def serve(connection):
    with connection:
        while data := connection.recv(65536):
            heard.write(data)
            heard.flush()
            connection.sendall(ok if b"HTTP/1" in data else bytes(32))
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
"""Takes a port, keeps what it is sent, and gives everybody the best score; it has bytes for a handshake too."""
