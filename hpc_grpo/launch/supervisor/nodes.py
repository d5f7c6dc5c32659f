"""The nodes of one attempt as the supervisor holds them: an agent on each, and Ray across all of them.

Consumes an allocation and the config; produces a Ray whose every node and GPU has joined. Never waits: `advance`
takes in what has happened and does the next step whose time has come, so that one loop can serve driver and nodes.
Only heartbeats have a thread of their own.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import NodesUnavailableError
from hpc_grpo.launch.agent.folders import shm_dir_path
from hpc_grpo.launch.agent.network import node_address
from hpc_grpo.launch.agent.protocol import NodeSpec
from hpc_grpo.launch.agent.ray_command import ray_environment
from hpc_grpo.launch.place.base import Allocation, Place
from hpc_grpo.launch.supervisor.agent_link import NodeLink
from hpc_grpo.launch.supervisor.bringup import RayWatch
from hpc_grpo.launch.supervisor.heartbeats import Heartbeats
from hpc_grpo.run.files import write_atomic


class Nodes:
    """From `start` to `tear_down`; `ray_address` and `num_gpus` hold once Ray has every node and GPU: `is_ready`."""

    def __init__(
        self,
        place: Place,
        allocation: Allocation,
        launch: LaunchConfig,
        token_path: Path,
        attempt_dir: Path,
        *,
        tag: str,
        working_dir: Path,
        contract: Mapping[str, str],
    ) -> None:
        """`tag` names the attempt on its nodes; `contract` are the variables that training is told."""
        self._place, self._allocation, self._launch = place, allocation, launch
        self._token_path, self._dir = token_path, attempt_dir
        self._tag, self._working_dir, self._contract = tag, working_dir, dict(contract)
        self._links: list[NodeLink] = []
        self._watch: RayWatch | None = None
        self._begun = 0.0
        self._heartbeats: Heartbeats | None = None
        self.is_ready = False
        self.ray_address = ""
        self.num_gpus = 0
        self.phases_s: dict[str, float] = {}

    def start(self) -> None:
        """Start an agent on every node; the head's Ray comes first."""
        self._begun = time.monotonic()
        _make_token(self._token_path)
        for node in self._allocation.nodes:
            self._links.append(NodeLink(self._place, node, self._dir / "nodes" / node))
        self._links[0].send_spec(self._spec(0, ""))
        self._heartbeats = Heartbeats(self._links)

    def sources(self) -> list[int]:
        """File descriptors that become readable when there is something to take in."""
        found = [link.fileno() for link in self._links if link.process.poll() is None]
        if self._watch is not None and self._watch.fileno() >= 0:
            found.append(self._watch.fileno())
        return found

    def advance(self) -> None:
        """Take in reports, and go on with bringing Ray up."""
        for link in self._links:
            link.read_reports()
        if self._watch is not None:
            self._watch.read()
            if not self.is_ready and self._watch.sees([link.up for link in self._links]):
                self._become_ready()
        elif self._links[0].up is not None:
            self._join_others(self._links[0].up.address)

    def check_bring_up(self) -> None:
        """Raises NodesUnavailableError when a node failed, or when they take too long: it names those missing."""
        for node, why in self.lost().items():
            raise NodesUnavailableError(f"Node {node} did not come up: {why}", [node])
        limit_s = self._launch.bringup_deadline_s
        if time.monotonic() - self._begun > limit_s:
            reports = {link.node: link.up for link in self._links}
            missing = self._watch.missing(reports) if self._watch else [self._allocation.head]
            raise NodesUnavailableError(
                f"After {limit_s:.0f} s not in Ray: {', '.join(missing)}. Their logs are in {self._dir / 'nodes'}; "
                f"launch.bringup_deadline_s gives more time.",
                missing,
            )

    def lost(self) -> dict[str, str]:
        """Nodes whose agent or Ray has ended -> why."""
        return {link.node: why for link in self._links if (why := link.why_ended())}

    def ask_for_stacks(self) -> None:
        """Have every process of the run write its Python stacks into the attempt's folder."""
        for link in self._links:
            link.ask_for_stacks()

    @property
    def names(self) -> tuple[str, ...]:
        return self._allocation.nodes

    def answering(self) -> list[str]:
        """After `tear_down`: the nodes on which another agent could be started."""
        return [link.node for link in self._links if link.node_answers()]

    def tear_down(self, deadline_s: float) -> list[str]:
        """End all leases and wait for the agents; gives the nodes that took too long and were killed."""
        if self._watch is not None:
            self._watch.close()
        if self._heartbeats is not None:
            self._heartbeats.stop()
        for link in self._links:
            link.release()
        deadline = time.monotonic() + deadline_s
        return [link.node for link in self._links if not link.wait(deadline)]

    def head_environment(self) -> dict[str, str]:
        """What the driver sees: the same as actors of the head node, where this process runs."""
        spec = self._spec(0, "")
        interface, ip = node_address(spec)
        return ray_environment(os.environ, spec, ip, interface, str(shm_dir_path(spec.tag)))

    def _join_others(self, head_address: str) -> None:
        self.phases_s["head"] = self._since_start()
        for index in range(1, len(self._links)):
            self._links[index].send_spec(self._spec(index, head_address))
        env = {**self.head_environment(), "RAY_ADDRESS": head_address}
        self._watch = RayWatch(head_address, env, self._dir / "probe.log")
        self.ray_address = head_address

    def _become_ready(self) -> None:
        assert self._watch is not None
        self._watch.close()
        self.phases_s["ray"] = self._since_start()
        self.num_gpus = sum(link.up.num_gpus for link in self._links if link.up)
        self.is_ready = True

    def _since_start(self) -> float:
        return round(time.monotonic() - self._begun, 2)

    def _spec(self, index: int, head_address: str) -> NodeSpec:
        launch, node = self._launch, self._allocation.nodes[index]
        return NodeSpec(
            node=node,
            tag=f"{self._tag}-{index}",  # some nodes share their /tmp
            head_address=head_address,
            token_path=str(self._token_path),
            log_dir=str(self._dir / "nodes" / node),
            working_dir=str(self._working_dir),
            interface=launch.interface,
            loopback=len(self._allocation.nodes) == 1,
            local_dir=launch.local_dir,
            object_store_gib=launch.object_store_gib,
            env=launch.env,
            pass_env=launch.pass_env,
            contract_env=self._contract,
            nodes=list(self._allocation.nodes),
        )


def _make_token(path: Path) -> None:
    """Ray's token of this run, in a file that only the user can read."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, secrets.token_hex(32), mode=0o600)
