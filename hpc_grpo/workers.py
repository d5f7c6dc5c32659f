"""The run's actors: learners, engines and graders on every node, started side by side.

Consumes the config and the reservations; produces connected actors. A node's actors are created all at once,
because importing vLLM and torch is most of the time until the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from hpc_grpo.config import Config
from hpc_grpo.learner.actor import LearnerActor
from hpc_grpo.learner.group import LearnerGroup
from hpc_grpo.placement import NodeSlots, uses_cuda
from hpc_grpo.remote import get_all
from hpc_grpo.rewards.grader import Grader
from hpc_grpo.rollout.engine import Engine
from hpc_grpo.rollout.engine_args import engine_environment
from hpc_grpo.rollout.scheduler import GroupSampler
from hpc_grpo.weights.sync import NodeMembers, WeightSync

_MAX_GROUPS_PER_GRADER = 10_000
"""Graders only wait; Ray's default of 1000 waiting calls would be one large step's."""


@dataclass(frozen=True)
class NodeWorkers:
    learners: Sequence[Any]
    engines: Sequence[Any]
    grader: Any


class Workers:
    """All actors of the run; `tokenizer` is shipped to graders, `stop_token_ids` end a completion."""

    def __init__(
        self,
        config: Config,
        slots: Sequence[NodeSlots],
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        total_optimizer_steps: int,
    ) -> None:
        self._config = config
        self._on_gpu = uses_cuda(config)
        num_learners = sum(len(slot.learner_bundles) for slot in slots)
        tokenizer_ref = ray.put(tokenizer)
        self._nodes: list[NodeWorkers] = []
        rank = 0
        for slot in slots:
            learners = []
            for index in range(len(slot.learner_bundles)):
                options = {
                    **slot.learner_options(index),
                    "runtime_env": {"env_vars": self._learner_environment()},
                }
                actor = ray.remote(LearnerActor).options(**options)
                learners.append(actor.remote(config, rank, num_learners, total_optimizer_steps))
                rank += 1
            self._nodes.append(
                NodeWorkers(learners, self._engines(slot, stop_token_ids), self._grader(slot, tokenizer_ref))
            )
        self.learners = LearnerGroup(config, [learner for node in self._nodes for learner in node.learners])

    def start(self) -> None:
        """Wait until every actor is up; raises the first one's error. Rewards are checked before models load."""
        get_all([node.grader.check.remote() for node in self._nodes if node.grader], None, "the rewards")
        engines = [engine.ready.remote() for node in self._nodes for engine in node.engines]
        self.learners.start()
        get_all(engines, None, "the engines")

    def connect_weights(self) -> WeightSync:
        sync = WeightSync(self._config, [NodeMembers(node.learners, node.engines) for node in self._nodes])
        sync.connect()
        return sync

    def group_sampler(self) -> GroupSampler:
        # Node by node in turn, so that neighbouring ordinals spread over nodes.
        engines_by_node = [node.engines for node in self._nodes]
        engines = [engine for rank in zip(*engines_by_node, strict=True) for engine in rank]
        return GroupSampler(engines, [node.grader for node in self._nodes])

    def _engines(self, slot: NodeSlots, stop_token_ids: Sequence[int]) -> list[Any]:
        environment = engine_environment(self._config, on_gpu=self._on_gpu)
        actor = ray.remote(Engine)
        return [
            actor.options(**slot.engine_options(index), runtime_env={"env_vars": environment}).remote(
                self._config, stop_token_ids, on_gpu=self._on_gpu
            )
            for index in range(len(slot.engine_bundles))
        ]

    def _grader(self, slot: NodeSlots, tokenizer: Any) -> Any:
        if not slot.engine_bundles:
            return None
        options = {**slot.grader_options(), "max_concurrency": _MAX_GROUPS_PER_GRADER}
        return ray.remote(Grader).options(**options).remote(self._config, tokenizer)

    def _learner_environment(self) -> dict[str, str]:
        threads = str(self._config.train.num_threads or 1)
        accelerator = "cuda" if self._on_gpu else "cpu"
        return {"OMP_NUM_THREADS": threads, "DS_ACCELERATOR": accelerator, "TORCH_CPP_LOG_LEVEL": "ERROR"}
