"""The supervisor's end of the node agents: start one, feed its lease, read its reports; heartbeats for all of them.

What is sent and reported is in `launch/agent/protocol.py`. Pipes carry it, whatever the place starts agents with.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_grpo.launch.agent.program import NodeProcess
from hpc_grpo.launch.agent.protocol import ALIVE, NodeReport, NodeSpec, report_from_line, take_part
from hpc_grpo.launch.place.base import AGENT_ENDED, Place
from hpc_grpo.launch.supervisor.events import Loss
from hpc_grpo.run.files import when_there_is_space
from hpc_grpo.system.waking_clock import WakingClock

_AGENT = "hpc_grpo.launch.agent.agent"
HEARTBEAT_S = 5.0
SILENT_AGENT_S = 60.0
"""Equal to its own lease: an agent that is stopped, or cut off, is given up as it would give up the supervisor."""


class AgentLink:
    """A node agent, running or ended; `up` is its report once Ray runs, `late` holds why it ended processes.

    `is_told`: a SIGTERM asked it to end. All but `send` is for the main thread.
    """

    def __init__(self, place: Place, node: str, log_dir: Path, *, has_own_disk: bool = False) -> None:
        """Start the agent; it does nothing until `send_spec`. `log_dir` is the node's in the attempt's folder."""
        self.node = node
        self.up: NodeReport | None = None
        self.late: list[str] = []
        self._clock = WakingClock()
        self._heard_at = self._now = self._clock.look()
        self._place = place
        self._failure = ""
        self._has_begun = False
        self.is_told = False
        self._is_torn_down = False
        self._was_killed = False
        self._writing = threading.Lock()
        self._attempt_dir = log_dir.parents[1]
        self._log = log_dir / "agent.log"
        when_there_is_space(lambda: log_dir.mkdir(parents=True, exist_ok=True), f"the log of node {node}")
        with when_there_is_space(lambda: self._log.open("ab"), f"the log of node {node}") as log:
            self._agent = NodeProcess(place, node, _AGENT, stderr=log, may_miss_copy=has_own_disk)
        self.process, self._stdin = self._agent.process, self._agent.stdin
        os.set_blocking(self._stdin.fileno(), False)

    def fileno(self) -> int:
        return self._agent.fileno()

    def send_spec(self, spec: NodeSpec) -> None:
        """Tell the agent what to do; wait while the pipe takes it. One that takes nothing for a minute is lost."""
        rest, stdin = spec.to_line(), self._stdin.fileno()
        with self._writing, contextlib.suppress(OSError):  # broken: `loss` tells
            while rest:
                if not select.select([], [stdin], [], SILENT_AGENT_S)[1]:
                    self._failure = f"its agent took nothing for {SILENT_AGENT_S:.0f} s of what it is told"
                    return
                rest = rest[os.write(stdin, rest) :]

    def send(self, line: bytes = b"\n", *, waits: bool = True) -> None:
        """Send an order, the head's address or a sign of life; an agent that has ended does not hear it.

        With `waits` False, never into a spec that is being sent: that is a sign of life too.
        """
        if self._writing.acquire(blocking=waits):
            try:
                os.write(self._stdin.fileno(), line)  # of a few bytes a pipe takes all, or none
            except OSError:
                return  # ended or stuck: `loss` and the agent's own lease tell
            finally:
                self._writing.release()

    def read_reports(self) -> None:
        """Take in what the agent has reported since the last call."""
        self._now = self._clock.look()
        for line in self._agent.lines():
            self._heard_at = self._now
            if take_part(line, self._attempt_dir, self.node):
                continue
            report = report_from_line(line)
            self._has_begun |= report is not None or line == ALIVE.strip()
            if report is None:
                continue
            match report.event:
                case "up":
                    self.up = report
                case "late":
                    self.late.append(report.why)
                case "failed":
                    self._failure = report.why
                case "told":
                    self.is_told = True
                case "gone":
                    self._is_torn_down = True

    def loss(self) -> Loss | None:
        """Return why the agent or its Ray is no more, or the agent silent; None while both live.

        Silence counts from its first sign of life: how long a place takes to start an agent says nothing.
        """
        why = self._failure
        if not why:
            if self.process.poll() is None:
                silent_s = self._now - self._heard_at
                if not self._has_begun or silent_s <= SILENT_AGENT_S:
                    return None
                return Loss(f"its agent gave no sign of life for {silent_s:.0f} s", is_machine=True)
            said = self._log.read_text(errors="replace").strip().splitlines()[-3:]
            why = f"{AGENT_ENDED} {self.process.returncode}"
            why += f": {' / '.join(said)}" if said else ""
        return Loss(why, is_machine=self._place.is_node_failure(why))

    def release(self) -> None:
        """End the lease: the agent tears down and exits, one that was stopped too."""
        if not self._stdin.closed:
            self._stdin.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)

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

    def node_answers(self) -> bool:
        """After `wait`: whether the node is still there. Its agent may have been killed, for want of memory say.

        A node that says itself that it leaves, as a worker does after Ctrl+C, is gone, although it tears down in order.
        """
        loss, has_left = self.loss(), bool(self._failure) and self._place.is_node_failure(self._failure)
        is_gone = self._was_killed or (loss is not None and loss.is_machine)
        return not has_left and (self._is_torn_down or not is_gone)


class Heartbeats:
    """Sends every agent a sign of life from the start to `stop`, from a thread that touches no disk.

    A shared file system may stall the supervisor's main thread for minutes; the agents must not take it for dead. The
    thread starts no process: the kernel would tie its parent-death signal to the thread.
    """

    def __init__(self, links: Sequence[AgentLink]) -> None:
        self._links = links
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread: no agent is written to any more, so that its pipe can be closed."""
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            for link in self._links:
                link.send(waits=False)
