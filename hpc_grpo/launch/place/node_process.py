"""One of our programs on a node of a place, spoken to in lines: stdin and stdout are pipes, wherever the node is.

The supervisor holds its node agents by it, `doctor` the process that examines a node.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import IO

from hpc_grpo.launch.place.base import Place
from hpc_grpo.launch.place.container import Container, node_command
from hpc_grpo.run.source import command_anywhere


class LineReader:
    """Reads whole lines from a pipe without blocking."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that have arrived since the last call, without their ends."""
        while True:
            try:
                data = os.read(self._pipe.fileno(), 65536)
            except OSError:  # nothing there yet; or a connection that broke, whose process has then ended
                return
            if not data:
                return
            *whole, self._rest = (self._rest + data).split(b"\n")
            yield from whole


class NodeProcess(LineReader):
    """Starts a module of ours on a node, and reads the lines it prints; `process` is what the place started it with."""

    def __init__(
        self,
        place: Place,
        node: str,
        module: str,
        stderr: IO[bytes],
        container: Container | None = None,
        *,
        may_miss_copy: bool = False,
    ) -> None:
        """Start it; `may_miss_copy`: the node may not see the run's copy of this package."""
        program = command_anywhere("-m", module) if may_miss_copy else node_command(container, module)
        self.process = place.connection(node, program, stderr) or subprocess.Popen(
            place.start_command(node, program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=place.start_environment(os.environ),
            start_new_session=True,  # Ctrl+C is for the starting process, which ends nodes in order
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin = self.process.stdin
        super().__init__(self.process.stdout)
