"""The run's actors: learners, engines and graders on every node, reserved together and started at the same time.

Each node has one Ray placement group. Most of the time before the first step is the import of vLLM and torch, so all
actors of a node start together.

If a supervisor can restart a crashed driver, engines and reservations are detached. Ray keeps detached actors after the
driver's process died; learners and graders end with the driver. The next driver finds engines by name. It keeps engines
that answer in time, have the same config and did not fail, and kills the others. Kept engines cancel their old requests
and empty their caches. The first publish loads the checkpoint's weights into them. The supervisor ends Ray, and with it
all engines, at the end of the attempt.
"""

from __future__ import annotations

import functools
import itertools
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util import get_placement_group, list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hpc_grpo.config import Config
from hpc_grpo.config.resources import Bundle, NodeDemand, check_fits, expects_gpus, node_demand
from hpc_grpo.data.tokenizer import decoder_of
from hpc_grpo.driver.engines import RemoteEngine, RemoteGrader, RolloutPool
from hpc_grpo.driver.inputs import Inputs
from hpc_grpo.driver.learners import LearnerGroup
from hpc_grpo.driver.remote import Deadline, errors_in_time, get_all
from hpc_grpo.driver.telemetry import Meters, Profiles
from hpc_grpo.driver.weights import Canary, NodeMembers, WeightSync
from hpc_grpo.engine.actor import Engine
from hpc_grpo.engine.sampler import Sampler
from hpc_grpo.errors import ConfigError, LaunchError, NodesUnavailableError
from hpc_grpo.grading.grader import Grader
from hpc_grpo.learner.actor import WATCHING, WRITING, LearnerActor
from hpc_grpo.run.contract import DISKS_VARIABLE, KEEPS_ENGINES_VARIABLE, NUM_NODES_VARIABLE
from hpc_grpo.run.keeper import Keeper
from hpc_grpo.run.paths import RunDir
from hpc_grpo.template.environment import runtime_env, uses_cuda

_RESERVE_DEADLINE_S = 60.0
_ANSWER_S = 10.0
"""Seconds in which a kept engine must answer. A slower one may hang, for example in a publish of a dead learner."""
_PIN = 0.001
"""Share of Ray's resource `node:IP` that ties a bundle to the node. So small that it never runs out."""
_MAX_CALLS = 1_000_000
"""Ray's limit of concurrent calls, above all that an engine or a grader ever has. Ray's default is 1000.

Each group is a waiting call. At the limit, a publish, a call too, would have to wait. Ray allocates nothing in advance.
"""
_KEEPER_THREADS = 8
"""Files written or read at the same time: enough for a fast disk. A slow sync of a file does not block the others."""


@dataclass(frozen=True)
class NodeSlots:
    """A node's reservation: the bundles of learners, then of engines. SFT has no engines, `model eval` no learners.

    If learners and engines share GPUs, engine i is in the bundle of learner i.
    """

    address: str
    group: PlacementGroup
    demand: NodeDemand

    def learner_options(self, index: int) -> dict[str, Any]:
        return self._options(self.demand.learners[index], index)

    def engine_options(self, index: int) -> dict[str, Any]:
        learners, engines, shares = self.demand.learners, self.demand.engines, self.demand.shares
        return self._options(engines[index], index + (0 if shares else len(learners)))

    def _options(self, bundle: Bundle, index: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        return {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}


def reserve_nodes(config: Config, *, trains: bool = True) -> list[NodeSlots]:
    """Reserve every node of the cluster, the head first, the others by address. `trains`: reserve learners too.

    Raises ConfigError for a node that is too small or lacks GPUs, and NodesUnavailableError for a lost node. Raises
    LaunchError if Ray does not grant all reservations within 60 s.
    """
    nodes = sorted(
        (node for node in ray.nodes() if node["Alive"]),
        key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeManagerAddress"]),
    )
    expected = int(os.environ.get(NUM_NODES_VARIABLE, "1"))
    if len(nodes) < expected:
        raise NodesUnavailableError(f"Only {len(nodes)} of the attempt's {expected} nodes are in Ray: a node was lost.")
    if expects_gpus(config) and not uses_cuda(config):
        print(
            f"No GPU here: the run computes on CPUs, in {config.model.dtype}. For a trial on CPUs set model.device=cpu "
            f"model.dtype=float32 engine.engines_per_node=1.",
            flush=True,
        )
    slots = [_reserve(config, node["NodeManagerAddress"], node["Resources"], trains) for node in nodes]
    waiting = [slot.group.ready() for slot in slots]
    granted, _ = ray.wait(waiting, num_returns=len(waiting), timeout=_RESERVE_DEADLINE_S)
    if len(granted) < len(waiting):
        raise LaunchError(f"Ray did not grant the reservations of all nodes within {_RESERVE_DEADLINE_S:.0f} s.")
    return slots


def _reserve(config: Config, address: str, resources: Mapping[str, float], trains: bool) -> NodeSlots:
    with_gpus = expects_gpus(config) and resources.get("GPU", 0) > 0
    if uses_cuda(config) and not with_gpus:
        wanted = f"model.device = {config.model.device}"
        if config.model.device == "auto":
            wanted += " means cuda here, because there is an NVIDIA driver,"
        raise ConfigError(
            f"{wanted} but this job has no GPUs on node {address}. With submit, set launch.slurm.gpus_per_node; in an "
            f"allocation of your own, request GPUs; on a workstation, check CUDA_VISIBLE_DEVICES. To train on CPUs, "
            f"set model.device=cpu."
        )
    demand = node_demand(config, with_gpus=with_gpus)
    if not trains:
        demand = replace(demand, learners=())
    num_gpus, num_cpus = resources.get("GPU", 0), resources.get("CPU", 0)
    check_fits(config, f"Node {address}", demand, num_gpus=num_gpus, num_cpus=num_cpus)
    bundles = [{**bundle, f"node:{address}": _PIN} for bundle in demand.bundles]
    name: dict[str, Any] = {}
    if keeps_engines(config):
        name = {"name": f"node {address}", "lifetime": "detached"}
        with suppress(ValueError):  # there is none: this driver is the first
            return NodeSlots(address, get_placement_group(name["name"]), demand)
    return NodeSlots(address, placement_group(bundles, strategy="STRICT_PACK", **name), demand)


def keeps_engines(config: Config) -> bool:
    """Return whether engines survive this driver. False if they share GPUs with learners, which need free memory."""
    return os.environ.get(KEEPS_ENGINES_VARIABLE) == "1" and not config.placement.colocate


def kept_engines(config: Config) -> dict[str, Any]:
    """Return the previous driver's engines that this driver can use, by `engine ADDRESS INDEX`. Kill the others."""
    found: dict[str, Any] = {}
    for name in list_named_actors():
        if name.startswith("engine "):
            with suppress(ValueError):  # the actor died after it was listed
                found[name] = ray.get_actor(name)
    asked = {name: engine.serve_next.remote(config) for name, engine in found.items()}
    calls = list(asked.values())
    answered = set(ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_S)[0]) if calls else set()
    kept: dict[str, Any] = {}
    for name, engine in found.items():
        place = name.rpartition(" ")[0]
        if asked[name] in answered and place not in kept and not errors_in_time([asked[name]], 0.0):
            kept[place] = engine
        else:
            ray.kill(engine)
    if found:
        print(f"Keeping {len(kept)} of the {len(found)} engines of the previous driver.", flush=True)
    return kept


class Workers:
    """All actors of the run, created at once; `start` waits for them."""

    def __init__(self, config: Config, slots: Sequence[NodeSlots], inputs: Inputs, total_optimizer_steps: int) -> None:
        """Create all actors, without waiting for them. Keep or kill the previous driver's engines.

        Engines of a node without learners load the weights of `model.path`.
        """
        self._config, self._inputs = config, inputs
        self._on_gpu = uses_cuda(config)
        self._total_optimizer_steps = total_optimizer_steps
        self._num_learners = sum(len(slot.demand.learners) for slot in slots)
        self._keeps = self._num_learners > 0 and keeps_engines(config)  # an eval loads other models next
        self._kept = kept_engines(config) if self._keeps else {}
        self._start_deadline = Deadline(config.deadlines.start_s, "deadlines.start_s")
        self._tokenizer, self._decode = ray.put(inputs.tokenizer), ray.put(decoder_of(inputs.tokenizer))
        head = slots[0].address
        keeper = None
        if os.environ.get(DISKS_VARIABLE) == "private":  # learners on other nodes write to the head's disk through it
            pinned = {f"node:{head}": _PIN}
            actor = ray.remote(Keeper).options(num_cpus=0, resources=pinned, max_concurrency=_KEEPER_THREADS)
            keeper = actor.remote(config.run_path)
        ranks = itertools.count()
        self._nodes = [
            NodeMembers(
                self._learners(slot, ranks, None if slot.address == head else keeper),
                [
                    RemoteEngine(functools.partial(self._start_engine, slot, index), slot.address, self._start_deadline)
                    for index in range(len(slot.demand.engines))
                ],
                self._grader(slot.address) if slot.demand.engines else None,
            )
            for slot in slots
        ]
        hosts = {node["NodeManagerAddress"]: node["NodeManagerHostname"] for node in ray.nodes()}
        names = [hosts[slot.address] for slot in slots]
        if len(set(names)) < len(names):
            names = [slot.address for slot in slots]
        self.meters = Meters(dict(zip(names, self._nodes, strict=True)))
        learners = [learner for node in self._nodes for learner in node.learners]
        self.learners = LearnerGroup(learners, config.train.sequence_parallel)

    def start(self) -> None:
        """Wait until every actor is up; raise the first error.

        Engines that share GPUs with learners start first, and sleep before the learners load the model.
        """
        engines = [engine.actor for node in self._nodes for engine in node.engines]
        ready = [engine.ready.remote() for engine in engines]
        if self._config.placement.colocate and self._num_learners:
            get_all(ready, None, "the engines")  # before the learners load: vLLM measures the free GPU memory
            get_all([engine.between_steps.remote(Sampler.sleep) for engine in engines], None, "the engines to sleep")
        self.learners.start()
        if self._num_learners and engines:
            self._weights = WeightSync(self._config, self._nodes)  # stores are allocated while engines still start
        get_all(ready, None, "the engines")

    def connect_weights(self, canary: Canary) -> WeightSync:
        """Form the groups that publish. Raises ConfigError if learners and engines have different parameters."""
        self._weights.connect(canary)
        return self._weights

    def rollout_pool(self, weights: WeightSync | None = None) -> RolloutPool:
        """Return the pool of engines and graders. `weights` loads the current weights into a replacement engine.

        Without `weights`, a replacement engine loads `model.path`.
        """
        # Node by node in turn, so that neighbouring ordinals spread over nodes.
        engines = [engine for rank in zip(*(node.engines for node in self._nodes), strict=True) for engine in rank]
        graders = [node.grader for node in self._nodes if node.grader is not None]
        return RolloutPool(engines, graders, RemoteEngine.replace if weights is None else weights.revive)

    def profiles(self, run_dir: RunDir) -> Profiles | None:
        """Return the profiles of the first learner and the first engine; None without `metrics.profile_steps`."""
        if (steps := self._config.metrics.profile_steps) is None:
            return None
        first = self._nodes[0]
        return Profiles(run_dir, steps, first.learners[0], first.engines[0] if first.engines else None)

    def stop(self) -> None:
        """Kill the engines and graders, so that those of the next model can start in their places."""
        for node in self._nodes:
            for member in (*node.engines, *filter(None, [node.grader])):
                ray.kill(member.actor)

    def _learners(self, slot: NodeSlots, ranks: Iterator[int], keeper: Any) -> list[Any]:
        actor = ray.remote(concurrency_groups={WRITING: 1, WATCHING: 1})(LearnerActor)
        environment = runtime_env("learner", self._config, on_gpu=self._on_gpu)
        return [
            actor.options(**slot.learner_options(index), runtime_env=environment).remote(
                self._config, next(ranks), self._num_learners, self._total_optimizer_steps, keeper
            )
            for index in range(len(slot.demand.learners))
        ]

    def _start_engine(self, slot: NodeSlots, index: int) -> Any:
        place = f"engine {slot.address} {index}"
        if (kept := self._kept.pop(place, None)) is not None:
            return kept
        options = {**slot.engine_options(index), "max_concurrency": _MAX_CALLS}
        if self._keeps:  # an engine and its replacement need different names
            options |= {"name": f"{place} {secrets.token_hex(4)}", "lifetime": "detached"}
        environment = runtime_env("engine", self._config, on_gpu=self._on_gpu)
        actor = ray.remote(Engine).options(**options, runtime_env=environment)
        stop_ids, reads_weights = self._inputs.stop_token_ids, not slot.demand.learners
        tokenizer = self._tokenizer if self._config.environments else None
        return actor.remote(self._config, stop_ids, tokenizer, on_gpu=self._on_gpu, reads_weights=reads_weights)

    def _grader(self, address: str) -> RemoteGrader:
        pinned = {f"node:{address}": _PIN}

        def start() -> Any:
            actor = ray.remote(Grader).options(num_cpus=0, resources=pinned, max_concurrency=_MAX_CALLS)
            return actor.remote(self._config, self._decode)

        return RemoteGrader(start, address, self._start_deadline)
