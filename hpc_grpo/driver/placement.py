"""Where learners, engines and graders run: one Ray placement group on every node.

Consumes the config and the nodes Ray knows; produces a reservation on each node, or a ConfigError that says
what does not fit. It waits for the reservations, which are granted at once since the sizes were checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hpc_grpo.config import Config
from hpc_grpo.config.resources import Bundle, check_fits, node_demand
from hpc_grpo.errors import ConfigError, LaunchError, NodesUnavailableError
from hpc_grpo.run.contract import NUM_NODES_VARIABLE

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_RESERVE_DEADLINE_S = 60.0
_PIN = 0.001
"""Of a node's own `node:IP` resource: ties a bundle to that node without using any of it up."""


@dataclass(frozen=True)
class NodeSlots:
    """A node's reservation: learners first, then engines; `engine_bundles` may be empty (SFT)."""

    address: str
    group: PlacementGroup
    learner_bundles: tuple[Bundle, ...]
    engine_bundles: tuple[Bundle, ...]

    def learner_options(self, index: int) -> dict[str, Any]:
        return self._options(self.learner_bundles[index], index)

    def engine_options(self, index: int) -> dict[str, Any]:
        return self._options(self.engine_bundles[index], len(self.learner_bundles) + index)

    def grader_options(self) -> dict[str, Any]:
        return {"num_cpus": 0, "resources": {f"node:{self.address}": _PIN}}

    def _options(self, bundle: Bundle, index: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        return {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": strategy,
        }


def uses_cuda(config: Config) -> bool:
    """Whether the models compute on GPUs; `auto` looks for the NVIDIA driver, without importing torch."""
    if config.model.device == "auto":
        return _NVIDIA_DRIVER.exists()
    return config.model.device == "cuda"


def reserve_nodes(config: Config) -> list[NodeSlots]:
    """Reserve every node of the cluster, the head first, the others by address.

    Raises ConfigError when a node is too small, NodesUnavailableError when a node is gone, LaunchError when Ray does
    not grant the reservation.
    """
    nodes = sorted(
        (node for node in ray.nodes() if node["Alive"]),
        key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeManagerAddress"]),
    )
    expected = int(os.environ.get(NUM_NODES_VARIABLE, "1"))
    if len(nodes) < expected:
        raise NodesUnavailableError(
            f"Of the {expected} nodes of this attempt only {len(nodes)} are in Ray: one was lost."
        )
    slots = [_reserve(config, node["NodeManagerAddress"], node["Resources"]) for node in nodes]
    waiting = [slot.group.ready() for slot in slots]
    granted, _ = ray.wait(waiting, num_returns=len(waiting), timeout=_RESERVE_DEADLINE_S)
    if len(granted) < len(waiting):
        raise LaunchError(f"Ray did not grant the reservations of all nodes within {_RESERVE_DEADLINE_S:.0f} s.")
    return slots


def _reserve(config: Config, address: str, resources: Mapping[str, float]) -> NodeSlots:
    with_gpus = config.placement.gpus == "auto" and resources.get("GPU", 0) > 0
    if uses_cuda(config) and not with_gpus:
        raise ConfigError(_no_gpus(config, address))
    demand = node_demand(config, with_gpus=with_gpus)
    available = {"num_gpus": resources.get("GPU", 0), "num_cpus": resources.get("CPU", 0)}
    check_fits(config, f"Node {address}", demand, **available)
    pinned = [{**bundle, f"node:{address}": _PIN} for bundle in demand.bundles]
    group = placement_group(pinned, strategy="STRICT_PACK")
    return NodeSlots(address, group, demand.learners, demand.engines)


def _no_gpus(config: Config, address: str) -> str:
    wanted = f"model.device = {config.model.device}"
    if config.model.device == "auto":
        wanted += " means cuda here, because there is an NVIDIA driver,"
    if config.placement.gpus == "none":
        return f"{wanted} but placement.gpus = none reserves no GPUs. Set placement.gpus=auto, or model.device=cpu."
    return (
        f"{wanted} but this job has no GPUs on node {address}. With submit, set launch.slurm.gpus_per_node; in an "
        f"allocation of your own, ask Slurm for GPUs; on a machine, see CUDA_VISIBLE_DEVICES. To train on CPUs, set "
        f"model.device=cpu."
    )
