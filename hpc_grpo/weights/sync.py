"""The driver's side of weight sync: one call per process, whatever the number of parameters.

`connect` agrees on the plan and builds each node's group; `publish` returns when every engine of every node
holds the new version, and raises the first engine's own error otherwise.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayTaskError

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError, HpcGrpoError, WeightSyncError
from hpc_grpo.remote import first_error, get_all
from hpc_grpo.weights.node_group import PUBLISHER_RANK, GroupMembership
from hpc_grpo.weights.plan import BucketPlan, make_plan

_ENGINE_ERROR_GRACE_S = 5.0


@dataclass(frozen=True)
class NodeMembers:
    """The actors of one node; the first learner writes the node's store."""

    learners: Sequence[Any]
    engines: Sequence[Any]


class WeightSync:
    """Publishes the learners' weights to the engines of all nodes."""

    def __init__(self, config: Config, nodes: Sequence[NodeMembers]) -> None:
        self._config = config
        self._nodes = nodes

    def connect(self) -> None:
        """Check the contract, create the stores and join the groups.

        Raises ConfigError with the difference listed when learner and engine mean different parameters.
        """
        weights = self._config.weights
        specs = get_all([self._learners[0].parameter_specs.remote()], None, "the learner's parameters")[0]
        plan = make_plan(specs, weights.bucket_mib * 2**20)
        self._check_contract(plan)
        # 63 bits: the checksums keyed with it travel in signed integers.
        key = secrets.randbits(63)
        folders = get_all(
            [
                learner.open_weight_store.remote(plan, weights.num_buffers, key, writes=index == 0)
                for node in self._nodes
                for index, learner in enumerate(node.learners)
            ],
            weights.deadline_s,
            "the weight stores",
        )
        writers = [folder for folder in folders if folder is not None]
        joins: list[Any] = []
        for node, folder in zip(self._nodes, writers, strict=True):
            joins += self._join_node(node, folder, plan, key)
        get_all(joins, weights.deadline_s, "the weight groups")

    def publish(self, version: int) -> None:
        """Stage on the learners while engines generate, then have every engine load the version."""
        deadline_s = self._config.weights.deadline_s
        get_all(
            [learner.stage_weights.remote(version) for learner in self._learners],
            deadline_s,
            "staging weights",
        )
        loading = [engine.receive_weights.remote(version) for node in self._nodes for engine in node.engines]
        announcing = [learner.announce_weights.remote() for learner in self._learners]
        try:
            get_all([*loading, *announcing], deadline_s, f"the publish of weight version {version}")
        except (HpcGrpoError, RayTaskError) as error:
            # A publisher only sees that a worker failed, and often answers first: the engine knows why.
            cause = first_error(loading, _ENGINE_ERROR_GRACE_S) or error
            raise WeightSyncError(f"Publishing weight version {version} failed: {cause}") from cause

    @property
    def _learners(self) -> list[Any]:
        return [learner for node in self._nodes for learner in node.learners]

    def _join_node(self, node: NodeMembers, folder: Any, plan: BucketPlan, key: int) -> list[Any]:
        ranks_per_engine = self._config.engine.tensor_parallel
        size = 1 + len(node.engines) * ranks_per_engine
        deadline_s, num_buffers = self._config.weights.deadline_s, self._config.weights.num_buffers
        joins = [
            engine.join_weight_group.remote(
                GroupMembership(folder, 1 + index * ranks_per_engine, size, deadline_s),
                plan,
                num_buffers,
                key,
            )
            for index, engine in enumerate(node.engines)
        ]
        publisher = GroupMembership(folder, PUBLISHER_RANK, size, deadline_s)
        return [node.learners[0].join_weight_group.remote(publisher), *joins]

    def _check_contract(self, plan: BucketPlan) -> None:
        engine = self._nodes[0].engines[0]
        differences = get_all([engine.contract_differences.remote(plan)], None, "the weight contract")[0]
        if differences:
            raise ConfigError(
                "Learner and engine disagree on the model's parameters, so weights cannot be published:\n  "
                + "\n  ".join(differences)
            )
