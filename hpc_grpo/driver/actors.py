"""The run's actors: learners, engines and graders on every node, started side by side.

Consumes the config and the reservations; produces connected actors. A node's actors are created all at once,
because importing vLLM and torch is most of the time until the first step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from hpc_grpo.config import Config
from hpc_grpo.driver.engines import RemoteEngine
from hpc_grpo.driver.inputs import Inputs
from hpc_grpo.driver.learners import LearnerGroup
from hpc_grpo.driver.placement import NodeSlots, uses_cuda
from hpc_grpo.driver.remote import get_all
from hpc_grpo.driver.sampling import RolloutPool
from hpc_grpo.driver.weights import NodeMembers, WeightSync
from hpc_grpo.engine.actor import Engine
from hpc_grpo.engine.vllm import engine_environment
from hpc_grpo.grading.grader import Grader
from hpc_grpo.learner.actor import LearnerActor

_MAX_GROUPS_PER_GRADER = 10_000
"""Graders only wait; Ray's default of 1000 waiting calls would be one large step's."""

_GPU_LEARNER_THREADS = 16


@dataclass(frozen=True)
class NodeWorkers:
    learners: Sequence[Any]
    engines: Sequence[RemoteEngine]
    grader: Any


class Workers:
    """All actors of the run, created at once; `start` waits for them."""

    def __init__(
        self,
        config: Config,
        slots: Sequence[NodeSlots],
        inputs: Inputs,
        total_optimizer_steps: int,
    ) -> None:
        self._config = config
        self._on_gpu = uses_cuda(config)
        self._inputs = inputs
        self._total_optimizer_steps = total_optimizer_steps
        self._num_learners = sum(len(slot.learner_bundles) for slot in slots)
        tokenizer = ray.put(inputs.tokenizer)
        ranks = itertools.count()
        self._nodes = [
            NodeWorkers(self._learners(slot, ranks), self._engines(slot), self._grader(slot, tokenizer))
            for slot in slots
        ]
        self.learners = LearnerGroup(config, [learner for node in self._nodes for learner in node.learners])

    def start(self) -> None:
        """Wait until every actor is up; raises the first one's error."""
        engines = [engine.actor.ready.remote() for node in self._nodes for engine in node.engines]
        self.learners.start()
        get_all(engines, None, "the engines")

    def connect_weights(self) -> WeightSync:
        """Raises ConfigError when learners and engines mean different parameters."""
        return WeightSync(self._config, [NodeMembers(node.learners, node.engines) for node in self._nodes])

    def group_sampler(self, weights: WeightSync) -> RolloutPool:
        """`weights` bring an engine that takes a dead one's place up to date."""
        # Node by node in turn, so that neighbouring ordinals spread over nodes.
        engines_by_node = [node.engines for node in self._nodes]
        engines = [engine for rank in zip(*engines_by_node, strict=True) for engine in rank]
        return RolloutPool(engines, [node.grader for node in self._nodes], weights.revive)

    def _learners(self, slot: NodeSlots, ranks: Iterator[int]) -> list[Any]:
        actor = ray.remote(LearnerActor)
        environment = {"env_vars": self._learner_environment()}
        return [
            actor.options(**slot.learner_options(index), runtime_env=environment).remote(
                self._config, next(ranks), self._num_learners, self._total_optimizer_steps
            )
            for index in range(len(slot.learner_bundles))
        ]

    def _engines(self, slot: NodeSlots) -> list[RemoteEngine]:
        max_restarts = self._config.engine.max_restarts
        return [
            RemoteEngine(functools.partial(self._start_engine, slot, index), slot.address, max_restarts)
            for index in range(len(slot.engine_bundles))
        ]

    def _start_engine(self, slot: NodeSlots, index: int) -> Any:
        environment = engine_environment(self._config, on_gpu=self._on_gpu)
        options = {**slot.engine_options(index), "runtime_env": {"env_vars": environment}}
        actor = ray.remote(Engine).options(**options)
        return actor.remote(self._config, self._inputs.stop_token_ids, on_gpu=self._on_gpu)

    def _grader(self, slot: NodeSlots, tokenizer: Any) -> Any:
        if not slot.engine_bundles:
            return None
        options = {**slot.grader_options(), "max_concurrency": _MAX_GROUPS_PER_GRADER}
        return ray.remote(Grader).options(**options).remote(self._config, tokenizer)

    def _learner_environment(self) -> dict[str, str]:
        # On a GPU node they run the optimizer of an offloading learner, whose cores nobody else wants.
        threads = str(self._config.train.num_threads or (_GPU_LEARNER_THREADS if self._on_gpu else 1))
        accelerator = "cuda" if self._on_gpu else "cpu"
        return {
            "OMP_NUM_THREADS": threads,
            # Threads that spin for long take the cores that engines need; ones that never do train half as fast.
            "GOMP_SPINCOUNT": "10000",
            "DS_ACCELERATOR": accelerator,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
