"""Examine nodes: get facts and measurements from a process on each node (node_program.py), and judge them.

Runs in the calling process; in a job, on its first node. Produces the groups "nodes" and "between nodes". Takes less
than a minute even if a process hangs: each question has a deadline, and all questions together have one.
"""

from __future__ import annotations

import json
import secrets
import select
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_grpo.config import LaunchConfig
from hpc_grpo.config.resources import engines_per_node, expects_gpus, node_demand, weight_store_bytes
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.agent.program import NodeProcess
from hpc_grpo.launch.agent.protocol import NodeSpec, Stage
from hpc_grpo.launch.place.base import Place
from hpc_grpo.launch.place.container import Container, container_of, node_command
from hpc_grpo.plan.budgets import published_parameters
from hpc_grpo.plan.model import read_model
from hpc_grpo.preflight import network
from hpc_grpo.preflight.findings import MAX_NAMED_NODES, Context, Finding, Findings, Groups, failure, ok, skipped
from hpc_grpo.preflight.folders import remove_own_folder
from hpc_grpo.preflight.network import Measured
from hpc_grpo.preflight.node_checks import NodeNeeds, node_findings
from hpc_grpo.preflight.node_facts import FACTS, NodeFacts
from hpc_grpo.types import GIB

NODES, BETWEEN = "nodes", "between nodes"
_WHOLE_S = 50.0
_FACTS_S = 25.0
_CLOCK_S = 5.0
_CANARY_S = 8.0
_MEASURE_S = 30.0
_CLOSE_S = 3.0
_POLL_S = 0.05
_PROBE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Reply:
    """A node's answer. `error` is why there is none, else "". `sent` and `received` are unix times of this machine."""

    value: Any = None
    error: str = ""
    sent: float = 0.0
    received: float = 0.0


class NodeLinks:
    """The processes on the nodes from their start to `close`. A node that once failed to answer is not asked again."""

    def __init__(
        self, place: Place, specs: Sequence[NodeSpec], container: Container | None = None, limit_s: float = 600.0
    ) -> None:
        """Start the processes. `limit_s` is the limit for all questions together."""
        self._deadline = time.monotonic() + limit_s
        self._errors = {spec.node: tempfile.TemporaryFile() for spec in specs}  # noqa: SIM115 as long as the processes
        program = node_command(container, "hpc_grpo.preflight.node_program")
        self._programs = {node: NodeProcess(place, node, program, errors) for node, errors in self._errors.items()}
        self._failed: dict[str, Reply] = {}
        for spec in specs:
            self._write(spec.node, spec.to_line())

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def ask_all(self, nodes: Iterable[str], deadline_s: float, question: str, **arguments: Any) -> dict[str, Reply]:
        return self.ask({node: {"ask": question, **arguments} for node in nodes}, deadline_s)

    def ask(self, requests: Mapping[str, dict[str, Any]], deadline_s: float) -> dict[str, Reply]:
        """Send each node its request and wait for all replies; late and dead nodes reply with an error."""
        deadline_s = min(deadline_s, self.left_s)
        deadline = time.monotonic() + deadline_s
        sent: dict[str, float] = {}
        for node in requests.keys() - self._failed.keys():
            sent[node] = time.time()
            self._write(node, json.dumps(requests[node]).encode() + b"\n")
        replies = {node: reply for node, reply in self._failed.items() if node in requests}
        while (waiting := sent.keys() - replies.keys()) and (left_s := deadline - time.monotonic()) > 0:
            by_pipe = {self._programs[node].fileno(): node for node in waiting}
            readable, _, _ = select.select(list(by_pipe), [], [], left_s)
            found = {by_pipe[pipe]: self._reply(by_pipe[pipe], sent[by_pipe[pipe]]) for pipe in readable}
            replies |= {node: reply for node, reply in found.items() if reply is not None}
        replies |= {node: self._fail(node, f"no answer within {deadline_s:.0f} s") for node in waiting}
        return {node: replies[node] for node in requests}

    def close(self, grace_s: float) -> None:
        """End the processes, all at the same time: by closing their stdin, then with SIGTERM, then SIGKILL."""
        for program in self._programs.values():
            with suppress(BrokenPipeError):  # it has ended before
                program.stdin.close()
        for sig in (None, signal.SIGTERM, signal.SIGKILL):
            living = [program.process for program in self._programs.values() if program.process.poll() is None]
            for process in living:
                if sig is not None:
                    process.send_signal(sig)
            deadline = time.monotonic() + grace_s
            while any(process.poll() is None for process in living) and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    def _write(self, node: str, line: bytes) -> None:
        with suppress(BrokenPipeError):  # it has ended: `_reply` says so
            self._programs[node].stdin.write(line)
            self._programs[node].stdin.flush()

    def _reply(self, node: str, sent: float) -> Reply | None:
        """Return the reply that has arrived, or an error if the process has ended, else None."""
        program = self._programs[node]
        for line in program.lines():
            if line.startswith((b'{"value"', b'{"error"')):  # srun and modules print too
                return Reply(**json.loads(line), sent=sent, received=time.time())
        code = program.process.poll()
        return None if code is None else self._fail(node, f"it ended with {code}")

    def _fail(self, node: str, why: str) -> Reply:
        self._errors[node].seek(0)
        last_words = self._errors[node].read().decode(errors="replace").strip().splitlines()
        self._failed[node] = Reply(error=why + (f": {last_words[-1]}" if last_words else ""))
        return self._failed[node]


def examine(place: Place, nodes: Sequence[str], context: Context, folder: Path) -> Groups:
    """Return the findings about `nodes` and their connections. Creates and removes `folder`, for the canary file."""
    launch = context.launch
    container = container_of(launch, context.config, [context.root, Path.cwd()])
    links = NodeLinks(place, _specs(place, nodes, context), container, _WHOLE_S)
    try:
        replies = links.ask_all(nodes, _FACTS_S, "facts")
        facts = [FACTS.validate_python(reply.value) for reply in replies.values() if not reply.error]
        findings = {"answers": _answered(replies, launch)}
        if facts:
            findings |= node_findings(facts, needs_of(context, is_job=place.queue is not None))
        if len(nodes) == 1:
            between = {check: skipped("one node") for check in ("canary", "clocks", "versions", "gloo")}
            if facts and facts[0].gpus:
                between |= _measured(links, facts, launch)
            else:
                between["nccl library"] = skipped("not needed: no GPU was seen")
        elif len(facts) < 2:
            between = {"network": skipped("fewer than two nodes answered")}
        else:
            names, has_own_disks = [node.node for node in facts], (launch.disks or place.disks) == "private"
            between = {
                "canary": skipped("each node has its own disk")
                if has_own_disks
                else _canary(links, names, folder, context.root),
                "clocks": _clocks(links, names),
                "versions": network.versions(facts),
                **_measured(links, facts, launch),
            }
        return {NODES: findings, BETWEEN: between}
    finally:
        links.close(_CLOSE_S)
        remove_own_folder(folder)


def _specs(place: Place, nodes: Sequence[str], context: Context) -> list[NodeSpec]:
    launch, job_id = context.launch, place.allocation().job_id
    return [
        NodeSpec(
            node=node,
            tag=f"{job_id}-d-{index}",
            head_address="",
            token_path="",
            log_dir="",
            working_dir="",
            interface=launch.interface,
            # The Ray of a run on one node listens on loopback.
            loopback=len(nodes) == 1 and (launch.num_nodes == 1 or place.queue is None),
            local_dir=launch.local_dir,
            object_store_gib=launch.object_store_gib,
            env=launch.env,
            pass_env=launch.pass_env,
            stage=Stage(compiled=str(context.root)),
        )
        for index, node in enumerate(nodes)
    ]


def _canary(links: NodeLinks, nodes: Sequence[str], folder: Path, root: Path) -> Finding:
    """Have the first node write a file below run.root, and the others read it."""
    first, *others = nodes
    file = {"path": str(folder / "canary"), "text": secrets.token_hex(16)}
    written = links.ask_all([first], _CANARY_S, "write_canary", **file)[first]
    if written.error:
        fix = "set run.root to a folder that compute nodes can write"
        return failure(f"{first} cannot write in {folder}: {written.error}", fix)
    seen = links.ask_all(others, _CANARY_S, "read_canary", **file, wait_s=_CANARY_S / 2)
    return network.canary(first, str(root), {node: reply.value is True for node, reply in seen.items()})


def _clocks(links: NodeLinks, nodes: Sequence[str]) -> Finding:
    """Compare the nodes' clocks. Assumes that a node answers halfway between question and reply."""
    replies = links.ask_all(nodes, _CLOCK_S, "clock")
    offsets_s = {node: r.value - (r.sent + r.received) / 2 for node, r in replies.items() if not r.error}
    if len(offsets_s) < 2:
        return skipped("fewer than two nodes answered")
    return network.clocks(offsets_s)


def _measured(links: NodeLinks, facts: Sequence[NodeFacts], launch: LaunchConfig) -> Findings:
    if broken := [node.node for node in facts if not node.address or not node.free_port]:
        return {"gloo": skipped(f"no address or port on {', '.join(broken)}, see above")}
    if missing := [node.node for node in facts if "torch" not in node.versions]:
        return {"gloo": skipped(f"no torch on {', '.join(missing)}")}
    head, left_s = facts[0], min(_MEASURE_S, links.left_s)
    probe = {"world_size": len(facts), "host": head.address, "port": head.free_port, "num_bytes": _PROBE_BYTES}
    requests = {
        node.node: {
            "ask": "measure",
            "probe": {**probe, "rank": rank, "timeout_s": left_s - 2},
            "deadline_s": left_s - 1,
        }
        for rank, node in enumerate(facts)
    }
    replies = links.ask(requests, left_s)
    measured = {n: Measured(error=r.error) if r.error else Measured(**r.value) for n, r in replies.items()}
    num_gpus = {node.node: len(node.gpus) for node in facts}
    return {
        "gloo": network.gloo(measured),
        "torch gpus": network.torch_gpus(measured, num_gpus),
        "nccl library": network.nccl_library(measured),
        "nccl": network.nccl(measured, launch.env.get("NCCL_NET")),
    }


def needs_of(context: Context, *, is_job: bool) -> NodeNeeds:
    """Return the needs of the config's run on a node. Without a config, only the object store's size is known."""
    launch, config = context.launch, context.config
    if config is None:
        return NodeNeeds(object_store_gib=launch.object_store_gib)
    demand = node_demand(config, with_gpus=expects_gpus(config))
    store_gib: float | None = 0.0
    if engines_per_node(config):
        try:
            model = read_model(config.model.path, context.job_environ)
            store_gib = weight_store_bytes(config, published_parameters(model, config)) / GIB
        except ConfigError:
            store_gib = None  # the login node's check of the model reports the error
    return NodeNeeds(
        gpus_per_node=launch.slurm.gpus_per_node if is_job else 0,
        device=config.model.device,
        worker_cpus=demand.num_cpus,
        worker_gpus=demand.num_gpus,
        store_gib=store_gib,
        object_store_gib=launch.object_store_gib,
    )


def _answered(replies: dict[str, Reply], launch: LaunchConfig) -> Finding:
    if silent := {node: reply.error for node, reply in replies.items() if reply.error}:
        says = "; ".join(f"{node}: {why}" for node, why in list(silent.items())[:MAX_NAMED_NODES])
        container = ", or correct launch.container if it is the cause" if launch.container else ""
        return failure(says, f"exclude the node (launch.slurm.extra.exclude), or look at it by hand{container}")
    more = " and more" if len(replies) > MAX_NAMED_NODES else ""
    return ok(", ".join(list(replies)[:MAX_NAMED_NODES]) + more)
