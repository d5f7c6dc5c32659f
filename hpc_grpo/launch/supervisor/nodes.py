"""The nodes of one attempt, managed by the supervisor: an agent on each, and Ray across all of them.

Takes an `AttemptSetup`. `is_ready` is True once every node and GPU has joined Ray. `advance` does not block: it reads
reports and takes the next step that is due, so one loop serves driver and nodes. `start` and `tear_down` may wait. Only
heartbeats use a thread.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from hpc_grpo.errors import NodesUnavailableError
from hpc_grpo.launch.agent.folders import shm_dir_path
from hpc_grpo.launch.agent.program import Inside, LineReader, Program, inside_of
from hpc_grpo.launch.agent.protocol import HEAD, NodeReport, Order
from hpc_grpo.launch.agent.ray_command import DASHBOARD_HOST, node_address, ray_environment, refuse_without_dashboard
from hpc_grpo.launch.supervisor.agent_link import AgentLink, Heartbeats
from hpc_grpo.launch.supervisor.attempt_setup import AttemptSetup
from hpc_grpo.launch.supervisor.transitions import Loss
from hpc_grpo.run.files import when_there_is_space, write_atomic
from hpc_grpo.run.owner import make_private_dir
from hpc_grpo.run.source import own_command

_PROBE_RETRY_S = 1.0


class Nodes:
    """Holds the nodes from `start` to `tear_down`. `ray_address` and `num_gpus` are valid once `is_ready`."""

    def __init__(self, setup: AttemptSetup) -> None:
        self._setup = setup
        self._links: list[AgentLink] = []
        self._watch: RayWatch | None = None
        self._begun = 0.0
        self._heartbeats: Heartbeats | None = None
        self.is_ready = False
        self.ray_address = ""
        self.ray_dashboard = ""
        self.num_gpus = 0
        self.phases_s: dict[str, float] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return self._setup.allocation.nodes

    def start(self) -> None:
        """Write Ray's token and start an agent on every node. Raises ConfigError if Ray lacks a requested dashboard."""
        if self._setup.launch.ray_dashboard and self._setup.container is None:
            refuse_without_dashboard()
        self._begun = time.monotonic()
        # Each Ray gets a new token that only the user can read: others may know the token in an old file.
        token, secret = secrets.token_hex(32), self._setup.run.secret

        def write_token() -> None:
            make_private_dir(secret.parent)
            write_atomic(secret, token, mode=0o600)

        when_there_is_space(write_token, "Ray's token")
        self._setup.ray_address_file.unlink(missing_ok=True)
        for node in self.names:
            is_away = self._setup.has_private_disks and node != self.names[0]
            log_dir = self._setup.dir / "nodes" / node
            self._links.append(AgentLink(self._setup.place, node, log_dir, has_own_disk=is_away))
        self._heartbeats = Heartbeats(self._links)  # before the specs, which a node may read slowly
        self._links[0].send_spec(self._setup.node_spec(self.names[0], ""))
        for link in self._links[1:]:  # these nodes make their copies while the head comes up
            link.send_spec(self._setup.joining_spec(link.node))

    def sources(self) -> list[int]:
        """Return file descriptors that become readable when reports or output arrive."""
        found = [link.fileno() for link in self._links if link.process.poll() is None]
        if self._watch is not None and self._watch.fileno() >= 0:
            found.append(self._watch.fileno())
        return found

    def advance(self) -> None:
        """Read reports, and continue the start of Ray."""
        for link in self._links:
            link.read_reports()
        if self._watch is not None:
            self._watch.read()
            if not self.is_ready and not self._watch.missing(self._reports()):
                self._watch.close()
                self.phases_s["ray"] = round(time.monotonic() - self._begun, 2)
                self.num_gpus = sum(link.up.num_gpus for link in self._links if link.up)
                self.is_ready = True
        elif (head := self._links[0].up) is not None:
            if self._setup.launch.ray_dashboard:
                self.ray_dashboard = f"{DASHBOARD_HOST}:{head.dashboard}"
            self.phases_s["head"] = round(time.monotonic() - self._begun, 2)
            for link in self._links[1:]:
                link.send(HEAD + head.address.encode() + b"\n")
            env = {**self.head_environment(), "RAY_ADDRESS": head.address}
            self._watch = RayWatch(head.address, env, self._setup.dir / "probe.log", self.inside("probe"))
            self.ray_address = head.address

    def bring_up_error(self) -> NodesUnavailableError | None:
        """Return why Ray cannot start: a failed node, or the deadline. None while it may still start."""
        for node, loss in self.lost().items():
            return NodesUnavailableError(f"Node {node} did not come up: {loss.why}", [node])
        limit_s = self._setup.launch.bringup_deadline_s
        if time.monotonic() - self._begun <= limit_s:
            return None
        missing = self._watch.missing(self._reports()) if self._watch else [self.names[0]]
        return NodesUnavailableError(
            f"After {limit_s:.0f} s not in Ray: {', '.join(missing)}. Their logs are in {self._setup.dir / 'nodes'}; "
            f"launch.bringup_deadline_s gives more time.",
            missing,
        )

    def publish_ray(self) -> None:
        when_there_is_space(lambda: write_atomic(self._setup.ray_address_file, self.ray_address), "the address of Ray")

    def lost(self) -> dict[str, Loss]:
        return {link.node: loss for link in self._links if (loss := link.loss()) is not None}

    def lost_may_come_back(self) -> bool:
        """Return whether nodes themselves are lost, not only their processes, and the place waits for such nodes."""
        return self._setup.place.awaits_lost_nodes and any(loss.is_machine for loss in self.lost().values())

    def take_late(self) -> list[str]:
        """Return why agents killed processes since the last call. Each sentence names the node."""
        taken = [f"On {link.node}: {why}" for link in self._links for why in link.late]
        for link in self._links:
            link.late.clear()
        return taken

    def told(self) -> list[str]:
        """Return the nodes whose agents received a signal to end."""
        return [link.node for link in self._links if link.is_told]

    def order(self, order: Order) -> None:
        for link in self._links:
            link.send(order.value)

    def tear_down(self, deadline_s: float) -> list[str]:
        """End all leases and wait for the agents. Return the nodes whose agents took too long and were killed."""
        if self._watch is not None:
            self._watch.close()
        if self._heartbeats is not None:
            self._heartbeats.stop()
        for link in self._links:
            link.release()
        deadline = time.monotonic() + deadline_s
        return [link.node for link in self._links if not link.wait(deadline)]

    def answering(self) -> list[str]:
        """After `tear_down`: return the nodes that can run another agent."""
        return [link.node for link in self._links if link.node_answers()]

    def anew(self, goes_on: Callable[[], bool]) -> Nodes | None:
        """After `tear_down`, return the nodes to continue with, not yet started.

        None if they are too few to train, or the head is lost. Waits for nodes that may return, while `goes_on()`.
        Raises NodesUnavailableError and EndAskedError like `Place.remaining`.
        """
        setup = self._setup
        allocation = setup.place.remaining(setup.allocation, self.answering(), goes_on)
        if len(allocation.nodes) < (setup.launch.min_nodes or len(self.names)) or self.names[0] not in allocation.nodes:
            return None
        return Nodes(replace(setup, allocation=allocation, nonce=secrets.token_urlsafe(6)))

    def head_environment(self) -> dict[str, str]:
        """Return the driver's environment: that of actors on the head node, where this process runs."""
        spec = self._setup.node_spec(self.names[0], "")
        interface, ip = node_address(spec)
        return ray_environment(os.environ, spec, ip, interface)

    def inside(self, program: str, suffix: str = "") -> Inside | None:
        """Return the container of a program on the head node, with its folder in shared memory. None: no container."""
        spec = self._setup.node_spec(self.names[0], "")
        return inside_of(spec, program, shm_dir_path(f"{spec.tag}{suffix}"))

    def _reports(self) -> dict[str, NodeReport | None]:
        return {link.node: link.up for link in self._links}


class RayWatch:
    """Watches with a probe which nodes and GPUs have joined Ray. Restarts a dead probe."""

    def __init__(self, address: str, env: Mapping[str, str], log_path: Path, inside: Inside | None = None) -> None:
        self._command = own_command("-m", "hpc_grpo.launch.agent.ray_program", "probe", address)
        self._env, self._inside = dict(env), inside
        self._log_path = log_path
        self._gpus: dict[str, int] = {}
        self._closed = False
        self._program, self._reader = self._start()

    def missing(self, reports: Mapping[str, NodeReport | None]) -> list[str]:
        """Return the nodes that have not reported Ray up, or whose GPUs have not all joined Ray."""
        return [node for node, up in reports.items() if up is None or self._gpus.get(up.ip, -1) < up.num_gpus]

    def fileno(self) -> int:
        return -1 if self._closed or self._program.poll() is not None else self._reader.fileno()

    def read(self) -> None:
        """Read the probe's output. Restart the probe if it died."""
        if self._closed:
            return
        for line in self._reader.lines():
            if line.startswith(b'{"nodes"'):  # Ray may print too, for example about a node that does not answer
                self._gpus = dict(json.loads(line)["nodes"])
        if self._program.poll() is not None and time.monotonic() >= self._restart_at:
            self._program, self._reader = self._start()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._program.send(signal.SIGKILL)  # SIGKILL does no harm: Ray drops the connection.
            self._program.end(grace_s=2.0)

    def _start(self) -> tuple[Program, LineReader]:
        self._restart_at = time.monotonic() + _PROBE_RETRY_S
        with when_there_is_space(lambda: self._log_path.open("ab"), self._log_path.name) as log:
            program = Program(self._command, self._env, self._inside, stdout=subprocess.PIPE, stderr=log)
        assert program.process.stdout is not None
        return program, LineReader(program.process.stdout)
