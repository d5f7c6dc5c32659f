"""Stand in for engines, learners and the weight store in the driver's loop: each knows how long it takes.

The clock is the driver's: whatever it waits for moves it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_grpo.config import Config
from hpc_grpo.driver.batches import Batch, TrainItem, balanced
from hpc_grpo.driver.rollouts import GradedGroup, spread
from hpc_grpo.simulate.engine import Call, SimulatedEngine
from hpc_grpo.simulate.lengths import Sequences, draw_lengths
from hpc_grpo.simulate.rates import DrawnStep, Rates
from hpc_grpo.types import GroupGrades, GroupRequest, Prompt, RemoteGroup


@dataclass
class Clock:
    """Simulated seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Setting:
    """Name nodes and a split that a run may be trained on; learners and engines are those of one node."""

    nodes: int
    learners: int
    engines: int
    lag: int


@dataclass
class SimulatedCluster:
    """The simulated run: a clock, what stands on the nodes, and which of the run's own steps each step is like."""

    config: Config
    sequences: Sequences
    rates: Rates
    setting: Setting
    drawing: random.Random = field(default_factory=lambda: random.Random(0))
    clock: Clock = field(default_factory=Clock)
    trained_s: float = 0.0
    waited_s: float = 0.0
    _draws: list[DrawnStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = self.setting.nodes * self.setting.engines
        self.engines = [SimulatedEngine(self.rates.decoding, self.config.engine.max_num_seqs) for _ in range(count)]

    def draw(self, step: int) -> DrawnStep:
        """Return the step of the run that this one is like: each of them once, in any order, and so on."""
        while len(self._draws) <= step:
            self._draws += self.drawing.sample(self.rates.draws, len(self.rates.draws))
        return self._draws[step]

    def spent(self) -> tuple[float, float, float]:
        """Return the time, and the seconds that all engines have sampled and all learners trained until then."""
        for engine in self.engines:
            engine.finish_all(self.clock.now)
        return self.clock.now, sum(engine.busy_s for engine in self.engines), self.trained_s


@dataclass(frozen=True)
class _Started:
    prompt: Prompt
    call: Call
    engine: SimulatedEngine
    grades: GroupGrades


class SimulatedPool:
    """Stands in for the `RolloutPool`, and chooses engines as it does."""

    num_engine_restarts = num_grader_restarts = 0

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._num_calls = 0
        self.version = 0

    def start(
        self, prompts: Sequence[Prompt], requests: Sequence[GroupRequest], with_texts: Sequence[bool]
    ) -> list[_Started]:
        cluster, engines = self._cluster, self._cluster.engines
        draw = cluster.draw(self._num_calls)
        self._num_calls += 1
        grades = [self._grades(prompt.ordinal, draw) for prompt in prompts]
        chosen = [
            engines[index] for index in spread(len(prompts), [engine.load(cluster.clock.now) for engine in engines])
        ]
        return [
            _Started(
                prompt, engine.submit(own.num_completion_tokens, cluster.clock.now, draw.sampling_factor), engine, own
            )
            for prompt, engine, own in zip(prompts, chosen, grades, strict=True)
        ]

    def wait(self, started: Sequence[_Started], waiting_for: str) -> list[GradedGroup]:
        clock = self._cluster.clock
        begun, clock.now = clock.now, max(clock.now, *(group.engine.end_of(group.call) for group in started))
        self._cluster.waited_s += clock.now - begun
        return [GradedGroup(group.prompt, None, group.grades) for group in started]

    def _grades(self, ordinal: int, draw: DrawnStep) -> GroupGrades:
        cluster, rollout = self._cluster, self._cluster.config.rollout
        size, longest = rollout.group_size, rollout.max_new_tokens
        lengths = draw_lengths(cluster.sequences.lengths, draw.scale, longest, size, cluster.drawing)
        is_alike = cluster.drawing.random() < draw.alike_share
        return GroupGrades(
            ordinal=ordinal,
            rewards=tuple(0.0 if is_alike else float(index % 2) for index in range(size)),
            reward_parts={},
            valid=(True,) * size,
            num_completion_tokens=tuple(lengths),
            truncated=tuple(length == longest for length in lengths),
            min_policy_versions=(self.version,) * size,
            mean_policy_versions=(float(self.version),) * size,
        )


class SimulatedLearners:
    """Stands in for the `LearnerGroup`: a step takes as long as its fullest learner."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self.num_trained = 0

    def train(self, batch: Batch, record: Path | None = None) -> dict[str, float]:
        cluster = self._cluster
        count = cluster.setting.nodes * cluster.setting.learners
        tokens = [0.0] * count
        fullest = 0.0
        for minibatch in batch.minibatches:
            parts = balanced(minibatch, [item.cost for item in minibatch], count)
            own = [sum(map(self._computed_tokens, part)) for part in parts]
            tokens = [total + more for total, more in zip(tokens, own, strict=True)]
            fullest += max(own)
        draw = cluster.draw(self.num_trained)
        self.num_trained += 1
        cluster.clock.now += draw.training_factor * cluster.rates.training(fullest)
        cluster.trained_s += draw.training_factor * sum(map(cluster.rates.training, tokens))
        return {}

    def _computed_tokens(self, item: TrainItem) -> int:
        is_alike = isinstance(item.data, RemoteGroup) and not any(item.data.advantages)
        return 0 if is_alike and self._cluster.sequences.leaves_out else item.num_trained_tokens


class SimulatedWeights:
    """Stands in for the `WeightSync`; the run's evals, checkpoints and records take their time here, after it."""

    def __init__(self, cluster: SimulatedCluster, pool: SimulatedPool, learners: SimulatedLearners) -> None:
        self._cluster = cluster
        self._pool = pool
        self._learners = learners

    def publish(self, version: int, *, is_checked: bool) -> dict[str, float]:
        if self._learners.num_trained:
            draw = self._cluster.draw(self._learners.num_trained - 1)
            self._cluster.clock.now += draw.publish_s + draw.between_s
        self._pool.version = version
        return {}

    def put_engines_to_sleep(self) -> None:
        """Cost nothing: it is in the seconds of the steps that were measured."""


class SimulatedStream:
    """Prompts as long as the run's, whatever they say."""

    num_items = 2**62

    def __init__(self, num_tokens: int) -> None:
        self._token_ids = (0,) * max(num_tokens, 1)

    def prompt(self, ordinal: int) -> Prompt:
        return Prompt(ordinal, 0, self._token_ids, "", {})
