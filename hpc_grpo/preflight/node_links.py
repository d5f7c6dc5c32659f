"""The asking end of the doctor's processes: one `node_program` on each node, asked side by side, with deadlines."""

from __future__ import annotations

import json
import select
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from hpc_grpo.launch.place.base import Place
from hpc_grpo.launch.place.container import Container
from hpc_grpo.launch.place.node_process import NodeProcess

_POLL_S = 0.05


@dataclass(frozen=True)
class Reply:
    """A node's answer: `error` is "" if there is one; `sent` and `received` are this machine's unix times."""

    value: Any = None
    error: str = ""
    sent: float = 0.0
    received: float = 0.0


class NodeLinks:
    """The processes from their start to `close`; a node that once failed to answer is not asked again."""

    def __init__(self, place: Place, nodes: Sequence[str], container: Container | None = None) -> None:
        self._links = {node: _Link(place, node, container) for node in nodes}

    def ask(self, requests: Mapping[str, dict[str, Any]], deadline_s: float) -> dict[str, Reply]:
        """Send each node its request and wait for all replies; late and dead nodes reply with an error."""
        deadline = time.monotonic() + deadline_s
        waiting = {node: self._links[node] for node in requests if not self._links[node].failed}
        for node, link in waiting.items():
            link.send(requests[node])
        replies = {node: Reply(error=link.failed) for node, link in self._links.items() if link.failed}
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([link.fileno() for link in waiting.values()], [], [], left_s)
            for node, link in list(waiting.items()):
                if link.fileno() in readable and (reply := link.reply()) is not None:
                    replies[node] = reply
                    del waiting[node]
        for node, link in waiting.items():
            replies[node] = link.fail(f"no answer within {deadline_s:.0f} s")
        return {node: replies[node] for node in requests}

    def close(self, grace_s: float) -> None:
        """End the processes: by closing their stdin, then with SIGTERM, then SIGKILL, all of them side by side."""
        for link in self._links.values():
            link.close_stdin()
        for sig in (None, signal.SIGTERM, signal.SIGKILL):
            living = [link.process for link in self._links.values() if link.process.poll() is None]
            for process in living:
                if sig is not None:
                    process.send_signal(sig)
            deadline = time.monotonic() + grace_s
            while any(process.poll() is None for process in living) and time.monotonic() < deadline:
                time.sleep(_POLL_S)


class _Link:
    """One process and its pipes; `failed` says why it is not asked again, or ""."""

    def __init__(self, place: Place, node: str, container: Container | None) -> None:
        self.failed = ""
        self._sent = 0.0
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 as long as the process
        self._program = NodeProcess(place, node, "hpc_grpo.preflight.node_program", self._errors, container)
        self.process, self._stdin = self._program.process, self._program.stdin

    def fileno(self) -> int:
        return self._program.fileno()

    def send(self, request: dict[str, Any]) -> None:
        self._sent = time.time()
        try:
            self._stdin.write(json.dumps(request).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            return  # it has ended: reply() says so

    def reply(self) -> Reply | None:
        """Return the reply that has arrived, an error once the process has ended, or None where neither is so yet."""
        for line in self._program.lines():
            if line.startswith((b'{"value"', b'{"error"')):  # srun and modules print too
                return Reply(**json.loads(line), sent=self._sent, received=time.time())
        return None if self.process.poll() is None else self.fail(f"it ended with {self.process.returncode}")

    def fail(self, why: str) -> Reply:
        self._errors.seek(0)
        last_words = self._errors.read().decode(errors="replace").strip().splitlines()
        self.failed = why + (f": {last_words[-1]}" if last_words else "")
        return Reply(error=self.failed)

    def close_stdin(self) -> None:
        try:
            self._stdin.close()
        except BrokenPipeError:
            return  # it has ended before
