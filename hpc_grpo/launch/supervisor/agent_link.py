"""The supervisor's end of one node agent: start it as its place does, feed its lease, read its reports."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hpc_grpo.launch.agent.protocol import STACKS_REQUEST, NodeReport, NodeSpec, report_from_line
from hpc_grpo.launch.place.base import Place


class LineReader:
    """Whole lines from a non-blocking pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def lines(self) -> Iterator[bytes]:
        while True:
            try:
                data = os.read(self._pipe.fileno(), 65536)
            except BlockingIOError:
                return
            if not data:
                return
            *whole, self._rest = (self._rest + data).split(b"\n")
            yield from whole


class NodeLink:
    """A running (or ended) node agent. `up` is its report once Ray runs there.

    All but `heartbeat` is for the main thread.
    """

    def __init__(self, place: Place, node: str, log_dir: Path) -> None:
        self._place = place
        self.node = node
        self.log_dir = log_dir
        self.up: NodeReport | None = None
        self.failure = ""
        self.gone: NodeReport | None = None
        self._was_killed = False
        self._writing = threading.Lock()
        log_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-E", "-m", "hpc_grpo.launch.agent.agent"]
        with self.agent_log.open("ab") as log:
            self.process = subprocess.Popen(
                place.start_command(node, command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=place.start_environment(os.environ),
                start_new_session=True,  # Ctrl+C is for the supervisor, which ends nodes in order
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin = self.process.stdin
        self._reader = LineReader(self.process.stdout)
        os.set_blocking(self._stdin.fileno(), False)

    @property
    def agent_log(self) -> Path:
        return self.log_dir / "agent.log"

    def fileno(self) -> int:
        return self._reader.fileno()

    def send_spec(self, spec: NodeSpec) -> None:
        rest, stdin = spec.to_line(), self._stdin.fileno()
        with self._writing, contextlib.suppress(BrokenPipeError):
            os.set_blocking(stdin, True)
            while rest:  # a signal may cut a write of more than the pipe holds short
                rest = rest[os.write(stdin, rest) :]
            os.set_blocking(stdin, False)

    def heartbeat(self) -> None:
        """A sign of life. Never waits, and never falls into a spec: that is a sign of life too."""
        if self._writing.acquire(blocking=False):
            try:
                self._write(b"\n")
            finally:
                self._writing.release()

    def ask_for_stacks(self) -> None:
        """Have every process of the node write its Python stacks into the attempt's folder."""
        with self._writing:
            self._write(STACKS_REQUEST)

    def read_reports(self) -> None:
        """Take in what the agent has reported since the last call."""
        for line in self._reader.lines():
            report = report_from_line(line)
            if report is None:
                continue
            if report.event == "up":
                self.up = report
            elif report.event == "failed":
                self.failure = report.why
            elif report.event == "gone":
                self.gone = report

    def why_ended(self) -> str:
        """Why the agent or its step is no more, in words; "" while it lives."""
        if self.failure:
            return self.failure
        if self.process.poll() is None:
            return ""
        said = self.agent_log.read_text(errors="replace").strip().splitlines()[-3:]
        return f"its agent ended with exit code {self.process.returncode}" + (f": {' / '.join(said)}" if said else "")

    def release(self) -> None:
        """End the lease: the agent tears down and exits."""
        if not self._stdin.closed:
            self._stdin.close()

    def node_answers(self) -> bool:
        """After `wait`: whether the node is there still. Its agent may have been killed, for want of memory say."""
        return self.gone is not None or not (self._was_killed or self._place.is_node_failure(self.why_ended()))

    def wait(self, deadline: float) -> bool:
        """Wait until the agent is gone or `deadline` (monotonic); kills its step after that. False if killed."""
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read_reports()
            time.sleep(0.05)
        if self.process.poll() is None:
            self._was_killed = True
            self.process.terminate()
            try:
                self.process.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.read_reports()
        return not self._was_killed

    def _write(self, data: bytes) -> None:
        """Write a few bytes: to a pipe all of them go, or none."""
        try:
            os.write(self._stdin.fileno(), data)
        except (BrokenPipeError, BlockingIOError):
            return  # ended or stuck: why_ended and the agent's own lease tell; a heartbeat is not worth an error
