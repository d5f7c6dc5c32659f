"""Examine nodes: ask a process on each (node_program.py) for facts and measurements, and judge the answers.

Runs where the command runs: in a job, on its first node. Produces the groups "nodes" and "between nodes". Takes less
than a minute whatever hangs: every question has a deadline, and all of them have one together.
"""

from __future__ import annotations

import json
import secrets
import select
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_grpo.config import LaunchConfig
from hpc_grpo.config.resources import engines_per_node, expects_gpus, node_demand, weight_store_bytes
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.agent.program import NodeProcess
from hpc_grpo.launch.agent.protocol import NodeSpec, Stage
from hpc_grpo.launch.place.base import Place
from hpc_grpo.launch.place.container import Container, container_of
from hpc_grpo.plan.model import read_model
from hpc_grpo.preflight import network, node_checks
from hpc_grpo.preflight.findings import MAX_NAMED_NODES, Context, Finding, Group, failure, guarded, ok, skipped
from hpc_grpo.preflight.folders import remove_own_folder
from hpc_grpo.preflight.network import Measured
from hpc_grpo.preflight.node_checks import NodeNeeds
from hpc_grpo.preflight.node_facts import NodeFacts, facts_from
from hpc_grpo.preflight.torch_probe import ProbeSpec
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
    """A node's answer: `error` is "" if there is one; `sent` and `received` are this machine's unix times."""

    value: Any = None
    error: str = ""
    sent: float = 0.0
    received: float = 0.0


class NodeLinks:
    """The processes from their start to `close`. A node that once failed to answer is not asked again."""

    def __init__(self, place: Place, nodes: Sequence[str], container: Container | None = None) -> None:
        self._errors = {node: tempfile.TemporaryFile() for node in nodes}  # noqa: SIM115 as long as the processes
        self._programs = {
            node: NodeProcess(place, node, "hpc_grpo.preflight.node_program", errors, container)
            for node, errors in self._errors.items()
        }
        self._failed: dict[str, Reply] = {}

    def ask(self, requests: Mapping[str, dict[str, Any]], deadline_s: float) -> dict[str, Reply]:
        """Send each node its request and wait for all replies; late and dead nodes reply with an error."""
        deadline = time.monotonic() + deadline_s
        sent: dict[str, float] = {}
        for node in requests.keys() - self._failed.keys():
            sent[node] = time.time()
            with suppress(BrokenPipeError):  # it has ended: `_reply` says so
                self._programs[node].stdin.write(json.dumps(requests[node]).encode() + b"\n")
                self._programs[node].stdin.flush()
        replies = {node: reply for node, reply in self._failed.items() if node in requests}
        while (waiting := sent.keys() - replies.keys()) and (left_s := deadline - time.monotonic()) > 0:
            by_pipe = {self._programs[node].fileno(): node for node in waiting}
            readable, _, _ = select.select(list(by_pipe), [], [], left_s)
            found = {by_pipe[pipe]: self._reply(by_pipe[pipe], sent[by_pipe[pipe]]) for pipe in readable}
            replies |= {node: reply for node, reply in found.items() if reply is not None}
        replies |= {node: self._fail(node, f"no answer within {deadline_s:.0f} s") for node in waiting}
        return {node: replies[node] for node in requests}

    def close(self, grace_s: float) -> None:
        """End the processes: by closing their stdin, then with SIGTERM, then SIGKILL, all of them side by side."""
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

    def _reply(self, node: str, sent: float) -> Reply | None:
        """Return the reply that has arrived, an error once the process has ended, or None where neither is so yet."""
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


def examine(place: Place, nodes: Sequence[str], context: Context, folder: Path) -> list[Group]:
    """Return the findings about `nodes` and what is between them; `folder` is made for the canary, and removed."""
    examination = _Examination(place, nodes, context, folder)
    try:
        return examination.groups()
    finally:
        examination.close()


class _Examination:
    """The questions to the nodes, in order; what comes back late or not at all becomes a finding."""

    def __init__(self, place: Place, nodes: Sequence[str], context: Context, folder: Path) -> None:
        self._place, self._nodes, self._context, self._folder = place, nodes, context, folder
        self._deadline = time.monotonic() + _WHOLE_S
        container = container_of(context.launch, context.config, [context.root, Path.cwd()])
        self._links = NodeLinks(place, nodes, container)

    def groups(self) -> list[Group]:
        replies = self._ask({node: self._facts_request(node) for node in self._nodes}, _FACTS_S)
        facts = [facts_from(reply.value) for reply in replies.values() if not reply.error]
        findings = [_answered(replies, self._context.launch)]
        if facts:
            findings += node_checks.node_findings(facts, needs_of(self._context, is_job=self._place.queue is not None))
        return [Group(NODES, tuple(findings)), Group(BETWEEN, tuple(self._between(facts)))]

    def close(self) -> None:
        self._links.close(_CLOSE_S)
        remove_own_folder(self._folder)

    def _between(self, facts: Sequence[NodeFacts]) -> list[Finding]:
        if len(self._nodes) == 1:
            unmeasured = [skipped("gloo", "one node"), skipped("nccl library", "none is needed: no GPU was seen")]
            rest = self._measured(facts) if facts and facts[0].gpus else unmeasured
            return [*(skipped(check, "one node") for check in ("canary", "clocks", "versions")), *rest]
        if len(facts) < 2:
            return [skipped("network", "fewer than two nodes answered")]
        names = [node.node for node in facts]
        return [
            skipped("canary", "each node has a disk of its own")
            if (self._context.launch.disks or self._place.disks) == "private"
            else guarded("canary", lambda: self._canary(names), _WHOLE_S),
            guarded("clocks", lambda: self._clocks(names), _WHOLE_S),
            guarded("versions", lambda: network.versions(facts)),
            *self._measured(facts),
        ]

    def _canary(self, nodes: Sequence[str]) -> Finding:
        """Have the first node write a file below run.root, and the others read it."""
        first, *others = nodes
        file = {"path": str(self._folder / "canary"), "text": secrets.token_hex(16)}
        written = self._ask({first: {"ask": "write_canary", **file}}, _CANARY_S)[first]
        if written.error:
            fix = "set run.root to a folder that compute nodes can write"
            return failure("canary", f"{first} cannot write in {self._folder}: {written.error}", fix)
        read = {"ask": "read_canary", **file, "wait_s": _CANARY_S / 2}
        seen = self._ask(dict.fromkeys(others, read), _CANARY_S)
        self._ask({first: {"ask": "remove_canary", "path": file["path"]}}, _CANARY_S)
        return network.canary(first, str(self._context.root), {n: r.value is True for n, r in seen.items()})

    def _clocks(self, nodes: Sequence[str]) -> Finding:
        """Compare the nodes' clocks; an answer is taken for one given halfway between question and reply."""
        replies = self._ask({node: {"ask": "clock"} for node in nodes}, _CLOCK_S)
        offsets_s = {node: r.value - (r.sent + r.received) / 2 for node, r in replies.items() if not r.error}
        if len(offsets_s) < 2:
            return skipped("clocks", "fewer than two nodes answered")
        return network.clocks(offsets_s)

    def _measured(self, facts: Sequence[NodeFacts]) -> list[Finding]:
        if broken := [node.node for node in facts if not node.address or not node.free_port]:
            return [skipped("gloo", f"no address or port on {', '.join(broken)}, see above")]
        if missing := [node.node for node in facts if "torch" not in node.versions]:
            return [skipped("gloo", f"no torch on {', '.join(missing)}")]
        left_s = min(_MEASURE_S, self._deadline - time.monotonic())
        requests = {node.node: self._measure_request(rank, facts, left_s) for rank, node in enumerate(facts)}
        replies = self._ask(requests, left_s)
        measured = {n: Measured(error=r.error) if r.error else Measured(**r.value) for n, r in replies.items()}
        wanted_network = self._context.launch.env.get("NCCL_NET")
        num_gpus = {node.node: len(node.gpus) for node in facts}
        return [
            guarded("gloo", lambda: network.gloo(measured)),
            guarded("torch gpus", lambda: network.torch_gpus(measured, num_gpus)),
            guarded("nccl library", lambda: network.nccl_library(measured)),
            guarded("nccl", lambda: network.nccl(measured, wanted_network)),
        ]

    def _ask(self, requests: dict[str, dict[str, Any]], limit_s: float) -> dict[str, Reply]:
        return self._links.ask(requests, min(limit_s, max(0.0, self._deadline - time.monotonic())))

    def _facts_request(self, node: str) -> dict[str, Any]:
        launch = self._context.launch
        spec = NodeSpec(
            node=node,
            tag=f"{self._place.allocation().job_id}-d-{self._nodes.index(node)}",
            head_address="",
            token_path="",
            log_dir="",
            working_dir="",
            interface=launch.interface,
            loopback=self._is_alone(),
            local_dir=launch.local_dir,
            object_store_gib=launch.object_store_gib,
            env=launch.env,
            pass_env=launch.pass_env,
            stage=Stage(compiled=str(self._context.root)) if launch.keep_compiled else Stage(),
        )
        return {"ask": "facts", "spec": asdict(spec)}

    def _is_alone(self) -> bool:
        """Tell whether the run, too, would have one node: its Ray listens on loopback then."""
        one_job_node = self._context.launch.num_nodes == 1
        return len(self._nodes) == 1 and (one_job_node or self._place.queue is None)

    def _measure_request(self, rank: int, facts: Sequence[NodeFacts], left_s: float) -> dict[str, Any]:
        head, launch = facts[0], self._context.launch
        probe = ProbeSpec(rank, len(facts), head.address, head.free_port, _PROBE_BYTES, timeout_s=left_s - 2)
        return {
            "ask": "measure",
            "probe": asdict(probe),
            "interface": facts[rank].interface,
            "deadline_s": left_s - 1,
            "env": launch.env,
            "pass_env": launch.pass_env,
        }


def needs_of(context: Context, *, is_job: bool) -> NodeNeeds:
    """Return the needs of the config's run on a node; what is not known counts as nothing."""
    launch, config = context.launch, context.config
    if config is None:
        return NodeNeeds(object_store_gib=launch.object_store_gib)
    demand = node_demand(config, with_gpus=expects_gpus(config))
    return NodeNeeds(
        gpus_per_node=launch.slurm.gpus_per_node if is_job else 0,
        wants_cuda=config.model.device == "cuda",
        worker_cpus=demand.num_cpus,
        worker_gpus=demand.num_gpus,
        store_gib=_store_gib(context),
        object_store_gib=launch.object_store_gib,
    )


def _store_gib(context: Context) -> float | None:
    """Return the size of the weight store on a node, or None where the model is not known."""
    config = context.config
    assert config is not None
    if not engines_per_node(config):
        return 0.0
    try:
        model = read_model(config.model.path, context.job_environ)
    except ConfigError:
        return None  # the login node's check of the model says why
    return weight_store_bytes(config, model.num_parameters) / GIB


def _answered(replies: dict[str, Reply], launch: LaunchConfig) -> Finding:
    if silent := {node: reply.error for node, reply in replies.items() if reply.error}:
        says = "; ".join(f"{node}: {why}" for node, why in list(silent.items())[:MAX_NAMED_NODES])
        container = ", or mend launch.container if that is at fault" if launch.container else ""
        fix = f"exclude the node (launch.slurm.extra.exclude), or look at it by hand{container}"
        return failure("answers", says, fix)
    more = " and more" if len(replies) > MAX_NAMED_NODES else ""
    return ok("answers", ", ".join(list(replies)[:MAX_NAMED_NODES]) + more)
