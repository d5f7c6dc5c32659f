"""The supervisor's connection to a node agent: start the agent, renew its lease, read its reports. Also the heartbeats.

`launch/agent/protocol.py` defines the messages. They go through pipes, however the place starts agents.
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
from hpc_grpo.launch.supervisor.transitions import Loss
from hpc_grpo.run.files import when_there_is_space
from hpc_grpo.run.pulse import WakingClock
from hpc_grpo.run.source import command_anywhere, own_command

HEARTBEAT_S = 5.0
SILENT_AGENT_S = 60.0
"""Equal to the agent's lease: supervisor and agent give each other up after the same silence."""


class AgentLink(NodeProcess):
    """A node agent, running or ended. `up` is its report once Ray runs. `late` has the reasons why it killed processes.

    `is_told` means that SIGTERM or SIGHUP asked the agent to end. Only `send` may be called from other threads.
    """

    def __init__(self, place: Place, node: str, log_dir: Path, *, has_own_disk: bool = False) -> None:
        """Start the agent; it does nothing until `send_spec`. `log_dir` is the node's in the attempt's folder."""
        words = ("-m", "hpc_grpo.launch.agent.agent")  # a node with its own disk may not see the run's copy of it
        program = command_anywhere(*words) if has_own_disk else own_command(*words, flags=["-E"])
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
            super().__init__(place, node, program, log)
        os.set_blocking(self.stdin.fileno(), False)

    def send_spec(self, spec: NodeSpec) -> None:
        """Send the agent its spec, and wait until the pipe has it. The agent is lost after a minute of no progress."""
        rest, stdin = spec.to_line(), self.stdin.fileno()
        with self._writing, contextlib.suppress(OSError):  # On a broken pipe, `loss` returns the reason.
            while rest:
                if not select.select([], [stdin], [], SILENT_AGENT_S)[1]:
                    self._failure = f"its agent read none of its input for {SILENT_AGENT_S:.0f} s"
                    return
                rest = rest[os.write(stdin, rest) :]

    def send(self, line: bytes = b"\n", *, waits: bool = True) -> None:
        """Send an order, the head's address or a heartbeat. Does nothing if the agent has ended.

        With `waits` False, skips the line while a spec is being sent: the spec counts as a heartbeat.
        """
        if self._writing.acquire(blocking=waits):
            try:
                os.write(self.stdin.fileno(), line)  # a pipe takes all of a few bytes, or none
            except OSError:
                return  # The agent has ended or is stuck: `loss` and the agent's lease handle both.
            finally:
                self._writing.release()

    def read_reports(self) -> None:
        """Read the agent's reports since the last call."""
        self._now = self._clock.look()
        for line in self.lines():
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
        """Return why the agent is lost: it or its Ray ended, or it is silent. None while both live.

        Silence counts from the first heartbeat: a place may take long to start an agent.
        """
        why = self._failure
        if not why and self.process.poll() is None:
            silent_s = self._now - self._heard_at
            if not self._has_begun or silent_s <= SILENT_AGENT_S:
                return None
            return Loss(f"its agent gave no sign of life for {silent_s:.0f} s", is_machine=True)
        if not why:
            said = " / ".join(self._log.read_text(errors="replace").strip().splitlines()[-3:])
            why = f"{AGENT_ENDED} {self.process.returncode}" + (f": {said}" if said else "")
        return Loss(why, is_machine=self._place.is_node_failure(why))

    def release(self) -> None:
        """End the lease. The agent tears down and exits, even if it was stopped (SIGSTOP)."""
        self.stdin.close()
        self.process.send_signal(signal.SIGCONT)

    def wait(self, deadline: float) -> bool:
        """Wait until the agent has ended. After `deadline` (monotonic), kill its step and return False."""
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read_reports()
            time.sleep(0.05)
        if self.process.poll() is None:
            self._was_killed = True
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10.0)
            self.process.kill()
            self.process.wait()
        self.read_reports()
        return not self._was_killed

    def node_answers(self) -> bool:
        """Return True if the node is reachable after `wait`: then only its agent died, for example for lack of memory.

        A node that reports its own exit counts as lost: a worker after Ctrl+C, for example.
        """
        loss, has_left = self.loss(), bool(self._failure) and self._place.is_node_failure(self._failure)
        is_gone = self._was_killed or (loss is not None and loss.is_machine)
        return not has_left and (self._is_torn_down or not is_gone)


class Heartbeats:
    """Sends heartbeats to all agents until `stop`, from a thread that uses no disk.

    A shared file system may block the supervisor's main thread for minutes, and the agents must not give it up. The
    thread starts no process: the kernel would tie the process's parent-death signal to the thread.
    """

    def __init__(self, links: Sequence[AgentLink]) -> None:
        self._links = links
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. It writes to no agent after that, so the pipes can be closed."""
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            for link in self._links:
                link.send(waits=False)
