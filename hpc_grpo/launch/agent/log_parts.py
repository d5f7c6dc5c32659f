"""Logs of a node with a disk of its own, sent to the head as lines of the agent's stdout.

`hand_over` sends them when the agent ends, `take_part` writes them into the attempt's folder.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import IO, Any

from hpc_grpo.run.stacks import STACKS_NAME
from hpc_grpo.system.say import say

_LIMIT_S, _URGENT_S = 20.0, 2.0
_BEGIN = b'{"log"'
_PART_BYTES = 1 << 18
_MAX_FILE_BYTES = 8 << 20
"""Of a larger log only the end is sent."""
_MAX_BYTES = 64 << 20


def hand_over(folder: Path, stdout: IO[bytes], kept: Path, *, is_urgent: bool) -> None:
    """Send the files below `folder`; where the head does not take them in time, keep them at `kept` on this node."""
    deadline, descriptor = time.monotonic() + (_URGENT_S if is_urgent else _LIMIT_S), stdout.fileno()
    try:
        for line in _parts(folder):
            rest = memoryview(line)
            while rest:
                if not select.select([], [descriptor], [], max(deadline - time.monotonic(), 0.0))[1]:
                    raise TimeoutError("not taken in time")
                rest = rest[os.write(descriptor, rest[: select.PIPE_BUF]) :]  # so much of it never waits
    except OSError as error:  # no time left, or nobody reads any more
        shutil.copytree(folder, kept, dirs_exist_ok=True)
        say(f"Logs did not reach the head ({error}): they are in {kept} of this node", sys.stderr)


def take_part(line: bytes, attempt_dir: Path, node: str) -> bool:
    """Write the part of a log in a node's line into the attempt's folder; False where the line is no part.

    A part that cannot be written is only reported: the run's end does not hang on a log.
    """
    if not line.startswith(_BEGIN):
        return False
    try:
        _write_part(json.loads(line), attempt_dir, node)
    except (OSError, ValueError, KeyError, zlib.error) as error:
        say(f"A part of a log of node {node} is lost ({error})", sys.stderr)
    return True


def _write_part(values: dict[str, Any], attempt_dir: Path, node: str) -> None:
    name = PurePath(values["log"])
    is_own = name.parts[:1] == (STACKS_NAME,) or name.parts[:2] == ("nodes", node)
    if not is_own or ".." in name.parts or name.is_absolute():
        say(f"Node {node} sent a log by the name {name}, which is left out")
        return
    path = attempt_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not values["offset"] and path.exists():  # of a Ray before this one, in the same attempt
        path.replace(path.with_name(f"{path.name}.before"))
    with path.open("ab" if values["offset"] else "wb") as file:
        file.write(zlib.decompress(base64.b64decode(values["data"])))


def _parts(folder: Path) -> Iterator[bytes]:
    """Yield the lines of all files, stacks first: they are short, and say the most where time or bytes run out."""
    left = _MAX_BYTES
    files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    for path in sorted(files, key=lambda file: (STACKS_NAME not in file.relative_to(folder).parts[:1], file)):
        with path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            begin = file.seek(max(0, end - min(_MAX_FILE_BYTES, left)))
            left -= end - begin
            for offset in range(0, end - begin, _PART_BYTES):
                data = file.read(min(_PART_BYTES, end - begin - offset))
                packed = base64.b64encode(zlib.compress(data, 1)).decode()
                part = {"log": str(path.relative_to(folder)), "offset": offset, "data": packed}
                yield json.dumps(part).encode() + b"\n"
