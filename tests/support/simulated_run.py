"""A run of the real loop, scheduler, batches, stream, learner group and ledger, on actors that are simulated.

An engine writes tokens that tell their prompt and sample, a grader judges by the engine's own seeds, and learners note
the sequences that they would train on. All of it follows from the seeds of the requests, as vLLM's samples do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.config import Config
from hpc_grpo.data.cache import Row
from hpc_grpo.data.stream import Part, PromptStream
from hpc_grpo.driver.batches import Batch, RolloutBatches
from hpc_grpo.driver.engines import RolloutPool
from hpc_grpo.driver.journal import Session
from hpc_grpo.driver.learners import LearnerGroup
from hpc_grpo.driver.loop import TrainingLoop
from hpc_grpo.driver.rollouts import DriverState, RolloutScheduler
from hpc_grpo.driver.schedule import StepTimes, train_length
from hpc_grpo.errors import PromptError
from hpc_grpo.metrics.record import StepTimer
from hpc_grpo.run.ledger import Ledger
from hpc_grpo.run.paths import RunDir
from hpc_grpo.types import (
    Completion,
    Episode,
    GroupGrades,
    GroupRequest,
    GroupSamples,
    Minibatch,
    Prompt,
    RemoteGroup,
    TrainSequence,
)
from tests.support.ray_futures import Reference, answered, sampled

FIRST_TOKEN = 1000
"""Of what is sampled; prompts have smaller ones."""


@dataclass(frozen=True)
class Odds:
    """Chances by which a simulated run behaves: that a reward fails, that a completion is cut, and for each item of the
    stream that a completion is right. With `most_turns` prompts are played in an environment, which fails as often.
    """

    fails: float
    cut: float
    solves: Sequence[float]
    most_turns: int = 0


@dataclass
class TrainedStep:
    """A batch, the version it met, and what each learner was given of each of its optimizer steps."""

    batch: Batch
    policy_version: int
    shares: list[list[tuple[Minibatch[Any], list[TrainSequence]]]]


@dataclass
class SimulatedRun:
    """One attempt: every step it trained, the state after each as a checkpoint has it, and all grades by ordinal."""

    config: Config
    odds: Odds
    run_dir: RunDir
    num_learners: int = 1
    attempt: int = 1
    steps: list[TrainedStep] = field(default_factory=list)
    saved: list[dict[str, Any]] = field(default_factory=list)
    grades: dict[int, GroupGrades] = field(default_factory=dict)
    published: int = 0
    timer: StepTimer = field(default_factory=StepTimer)
    turn_lengths: dict[int, list[list[int]]] = field(default_factory=dict)
    num_restarts: int = 0
    is_writing: bool = False
    _seeds: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _asked: dict[str, Sequence[GroupRequest]] = field(default_factory=dict)

    def run(self, saved: Mapping[str, Any] | None = None) -> SimulatedRun:
        """Train to the end, or until each prompt rests for ever, from a state as JSON brings it back."""
        state = DriverState(**json.loads(json.dumps(saved))) if saved else DriverState()
        own: Any = self
        self._algorithm = algorithm_of(self.config)
        self._ledger = Ledger(self.run_dir, self.attempt)
        self._stream = stream_of(self.config, len(self.odds.solves))
        length = train_length(self.config, len(self._stream))
        session = Session(self.config, self.run_dir, length, own, own, own, StepTimes.after(None))
        engine, grader = SimpleNamespace(actor=own, num_restarts=0), SimpleNamespace(actor=own, num_restarts=0)
        grader.note_success = lambda: None
        revive: Any = None
        pool = RolloutPool([engine] * 2, [grader], revive)  # type: ignore[list-item]
        scheduler = RolloutScheduler(self.config, self._stream, pool, state, length.total_steps)
        learners = LearnerGroup([SimpleNamespace(train=_remote(self._train)) for _ in range(self.num_learners)])
        batches = self._watched(RolloutBatches(self.config, scheduler))
        try:
            TrainingLoop(session, batches, learners, own).run(state)
        except PromptError as error:
            assert "rest forever" in str(error)
        return self

    def _watched(self, batches: RolloutBatches) -> Any:
        def take_step(policy_version: int, timer: StepTimer) -> Batch:
            batch = batches.take_step(policy_version, timer)
            self.steps.append(TrainedStep(batch, policy_version, []))
            return batch

        return SimpleNamespace(start=batches.start, take_step=take_step)

    # An engine, and a grader.
    @property
    def generate(self) -> Any:
        return _remote(lambda call, asked: self._asked.update({call: asked}))

    @property
    def samples(self) -> Any:
        return SimpleNamespace(remote=lambda call, at: sampled(answered(self._sample(self._asked[call][at]))))

    @property
    def grade(self) -> Any:
        return _remote(self._grade)

    def _sample(self, request: GroupRequest) -> GroupSamples:
        self._seeds[request.ordinal] = request.seeds
        return GroupSamples(request.ordinal, tuple(self._episode(request, at) for at in range(len(request.seeds))))

    def _episode(self, request: GroupRequest, index: int) -> Episode:
        chance, turns, prompt = random.Random(request.seeds[index]), [], np.asarray(request.prompt_token_ids, np.int32)
        for number in range(chance.randint(1, self.odds.most_turns or 1)):
            tokens = np.full(chance.randint(1, 4), FIRST_TOKEN + request.ordinal * 100 + index, np.int32)
            versions = np.full(len(tokens), self.published, np.int32)
            starts_anew = not number or chance.random() < 0.3
            context = (
                np.append(prompt, prompt[: number % 2]) if starts_anew else np.full(chance.randint(1, 3), 7, np.int32)
            )
            reward = float(chance.randint(0, self.odds.most_turns))
            turns.append(Completion(tokens, -tokens.astype(np.float32), versions, "stop", context, starts_anew, reward))
        failure = "away" if self.odds.most_turns and chance.random() < self.odds.fails else ""
        if failure and chance.random() < 0.5:
            turns = []
        return Episode(tuple(turns), "length" if chance.random() < self.odds.cut else "stop", failure)

    def _grade(self, reference: Reference, prompt: Prompt, with_texts: bool) -> GroupGrades:
        samples: GroupSamples = reference.result()
        seeds = self._seeds[samples.ordinal]
        has_failed = random.Random(seeds[0] + 1).random() < self.odds.fails
        solves = self.odds.solves[prompt.fields["item"]]
        rewards = tuple(float(not has_failed and random.Random(seed + 2).random() < solves) for seed in seeds)
        episodes = samples.episodes
        turn_rewards = tuple(tuple(turn.reward for turn in episode.turns) for episode in episodes)
        if self.odds.most_turns:
            rewards = tuple(
                0.0 if has_failed or episode.failure else sum(own) + right
                for episode, own, right in zip(episodes, turn_rewards, rewards, strict=True)
            )
        cut = tuple(episode.finish_reason == "length" for episode in episodes)
        masks = self.config.rollout.mask_truncated
        versions = tuple(
            min((int(turn.policy_versions.min()) for turn in episode.turns), default=-1) for episode in episodes
        )
        self.turn_lengths[samples.ordinal] = [[len(turn.token_ids) for turn in episode.turns] for episode in episodes]
        grades = GroupGrades(
            ordinal=samples.ordinal,
            rewards=rewards,
            reward_parts={"right": rewards},
            valid=tuple(
                not has_failed and not episode.failure and not (masks and was_cut)
                for episode, was_cut in zip(episodes, cut, strict=True)
            ),
            num_completion_tokens=tuple(episode.num_sampled_tokens for episode in episodes),
            truncated=cut,
            min_policy_versions=versions,
            mean_policy_versions=tuple(map(float, versions)),
            texts=tuple(f"sample {index}" for index in range(len(cut))) if with_texts else (),
            errors=(f"prompt {samples.ordinal}, right: gone",) if has_failed else (),
            turn_rewards=turn_rewards if self.odds.most_turns else (),
            num_prompt_tokens=len(prompt.token_ids),
            num_observed_tokens=tuple(sum(len(turn.context_ids) for turn in own.turns[1:]) for own in episodes),
            num_sequences=tuple(episode.num_sequences for episode in episodes),
            failures=tuple(episode.failure for episode in episodes),
        )
        self.grades[samples.ordinal] = grades
        return grades

    # Learners.
    def _train(
        self, share: Sequence[Minibatch[Any]], record: Path | None, measured: Sequence[RemoteGroup] | None
    ) -> dict[str, Any]:
        made = []
        for minibatch in share:
            sequences: list[TrainSequence] = []
            for group in minibatch.sequences:
                samples = group.samples.result()  # type: ignore[union-attr]
                sequences += self._algorithm.sequences(samples, group.advantages, group.valid)  # type: ignore[union-attr]
            made.append((minibatch, sequences))
        self.steps[-1].shares.append(made)
        return {}

    # Weights, journal, checkpoints and the request to stop.
    def publish(self, version: int) -> dict[str, float]:
        self.published = version
        return {}

    def record_step(self, state: DriverState, metrics: Mapping[str, float], batch: Batch) -> None:
        self._ledger.append(state.step, batch.ordinals, dropped=batch.dropped, passed_over=batch.passed_over)

    def save_if_due(self, state: DriverState) -> None:
        self.saved.append(asdict(state))

    def save(self, state: DriverState) -> None:
        """Where no prompt is left: a resume begins here, and says the same."""
        assert not self.saved or self.saved[-1] == asdict(state)

    def reason(self, step_and_save_s: float) -> str | None:
        return None


def stream_of(config: Config, num_items: int) -> PromptStream:
    """Deal `num_items` items out to the sources of `data.train`."""
    rows = [Row(f"item {item}", (item, item), (), json.dumps({"item": item}), item) for item in range(num_items)]
    sources = config.data.sources(for_eval=False)
    parts = []
    for position, (_, source) in enumerate(sources):
        own: Any = rows[position :: len(sources)]
        parts.append(Part(f"s{position}", source, own, np.arange(len(own), dtype=np.int64)))
    return PromptStream(parts, config.run.seed, shuffle=config.data.shuffle)


def _remote(call: Any) -> Any:
    """Stand in for a Ray method: its `remote` gives the future of what `call` returns."""

    return SimpleNamespace(remote=lambda *args: answered(call(*args)))
