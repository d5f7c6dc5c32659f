"""The command by which Ray starts a worker that has a template: `python -I -S client.py SOCKET FILE ...`.

The template at SOCKET (`server.py`) goes on as `python FILE ...`, and this process ends; without a template this
process becomes that Python. Imports nothing but what Python has at hand: each import here delays every actor.
"""

import json
import os
import socket
import struct
import sys

FORKED = b"forked"
SIZE = struct.Struct("!Q")


def is_forked(path: str, words: list[str]) -> bool:
    """Ask the template, and wait until it has imported; False where there is none, or it does not fork."""
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
