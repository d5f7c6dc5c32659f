"""The command by which Ray starts a worker from a template: `python -I -S client.py SOCKET FILE ...`.

The template at SOCKET (`server.py`) forks and runs `python FILE ...`, and this process ends. Without a template, this
process runs that command itself. Imports only modules that Python has loaded: each import would delay every actor.
"""

import json
import os
import socket
import struct
import sys

FORKED = b"forked"
SIZE = struct.Struct("!Q")


def is_forked(path: str, words: list[str]) -> bool:
    """Ask the template to fork, and wait for its imports. Return False if there is no template, or it refuses."""
    cwd = os.getcwd()  # noqa: PTH109 - pathlib would be an import
    asked = json.dumps({"words": words, "environ": dict(os.environ), "cwd": cwd}).encode()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            socket.send_fds(connection, [SIZE.pack(len(asked))], [0, 1, 2])
            connection.sendall(asked)
            return connection.recv(len(FORKED)) == FORKED
    except OSError:
        return False


if __name__ == "__main__":
    if not is_forked(sys.argv[1], sys.argv[2:]):
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
