"""The batches that steps train on, as items for the learners: groups of rollouts, or demonstrations.

Token arrays of rollouts stay in the object store: an item refers to them. Rollouts wait for engines and graders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hpc_grpo.algorithms.tasks import algorithm_of, demonstration_sequence
from hpc_grpo.config import Config
from hpc_grpo.config.resources import budget_of
from hpc_grpo.data.curriculum import Known
from hpc_grpo.data.stream import DemonstrationStream
from hpc_grpo.driver.rollouts import RolloutScheduler, StepGroups
from hpc_grpo.driver.sampling import GradedGroup
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.actor import RemoteGroup
from hpc_grpo.learner.split import cost
from hpc_grpo.metrics.rollouts import rollout_metrics, selection_metrics
from hpc_grpo.metrics.timing import StepTimer
from hpc_grpo.types import GroupGrades, TrainSequence

_MEASURED_EVERY = 16
"""Of so many completions one tells the mismatch: a share of a step's forward passes, and enough tokens for a mean."""


@dataclass(frozen=True)
class TrainItem:
    """A group or a demonstration, which one learner trains on whole. Their shares are balanced by `cost`, in tokens."""

    data: RemoteGroup | TrainSequence
    num_trained_tokens: int
    cost: float
    num_sequences: int = 1


@dataclass(frozen=True)
class Batch:
    """A step's items by optimizer step, the ordinals it used without a gap, and the lines of rollouts/step_N.jsonl.

    Of the ordinals, `dropped` were sampled and not trained on, and `passed_over` not sampled. `curriculum` is what is
    known of prompts after the step, and `ahead` what it has chosen for later ones (`RolloutScheduler.ahead`).
    `measured` are the completions that tell the mismatch of engine and learner, each as its group with no other valid.
    """

    minibatches: Sequence[Sequence[TrainItem]]
    ordinals: Sequence[int]
    metrics: Mapping[str, float]
    lines: Sequence[Mapping[str, Any]] = ()
    dropped: Sequence[int] = ()
    passed_over: Sequence[int] = ()
    curriculum: Known = field(default_factory=dict)
    ahead: Sequence[int] = ()
    measured: Sequence[RemoteGroup] = ()


class Batches(Protocol):
    """The batches of a run, in order."""

    def start(self, policy_version: int) -> None:
        """Begin whatever may begin now that engines hold this version."""

    def take_step(self, policy_version: int, timer: StepTimer) -> Batch: ...


class RolloutBatches:
    """Groups of rollouts, with the advantages that the run's algorithm gives them."""

    def __init__(self, config: Config, scheduler: RolloutScheduler) -> None:
        self._num_minibatches = config.train.num_minibatches
        self._drops_zero_variance = config.rollout.drop_zero_variance
        self._algorithm = algorithm_of(config)
        self._judged_by = config.eval
        needs, budget = config.needs, budget_of(config)
        is_told_by_advantages = not (needs.reference or needs.teacher or needs.critic)
        self._leaves_out_still = (
            config.train.skip_zero_advantages and config.loss.is_still_without_advantage and is_told_by_advantages
        )
        self._shares_prompts = budget.shares_prompts
        self._has_several_sources = len(config.data.sources(for_eval=False)) > 1
        self._scheduler = scheduler

    def start(self, policy_version: int) -> None:
        self._scheduler.start_prompts(policy_version)

    def take_step(self, policy_version: int, timer: StepTimer) -> Batch:
        with timer.phase("generate_wait"):
            step = self._scheduler.take_step(policy_version)
        advantages = self._advantages([group.grades for group in step.trained])
        trained = list(zip(step.trained, advantages, strict=True))
        items = [self._item(group, own) for group, own in trained]
        curriculum = self._scheduler.curriculum
        return Batch(
            minibatches=_split(items, self._num_minibatches),
            ordinals=step.ordinals,
            metrics=self._metrics(step, policy_version, [group for group, own in trained if self._leaves_out(own)]),
            measured=_measured(step.sampled),
            lines=[
                line
                for group, own in (*trained, *((group, None) for group in step.dropped))
                for line in _lines(group, own)
            ],
            dropped=[group.prompt.ordinal for group in step.dropped],
            passed_over=step.passed_over,
            curriculum=curriculum.known if curriculum else {},
            ahead=self._scheduler.ahead,
        )

    def _metrics(self, step: StepGroups, policy_version: int, left_out: Sequence[GradedGroup]) -> dict[str, float]:
        sources = [group.prompt.source for group in step.sampled] if self._has_several_sources else ()
        sampled, dropped = ([group.grades for group in own] for own in (step.sampled, (*step.dropped, *left_out)))
        curriculum = self._scheduler.curriculum
        return {
            **rollout_metrics(sampled, policy_version, self._judged_by, sources),
            **_lengths(step.sampled),
            **selection_metrics(len(sampled), len(step.passed_over), dropped),
            **(curriculum.metrics() if curriculum else {}),
            "engine/restarts": self._scheduler.num_engine_restarts,
            "grading/restarts": self._scheduler.num_grader_restarts,
        }

    def _advantages(self, step: Sequence[GroupGrades]) -> list[tuple[float, ...]]:
        """Compute the advantages `[G]` of each group. Raises ConfigError where the user's function gives others."""
        every = [tuple(map(float, own)) for own in (self._algorithm.step_advantages(step) if step else ())]
        for grades, values in zip(step, every, strict=True):
            if len(values) != len(grades.rewards) or not all(map(math.isfinite, values)):
                raise ConfigError(
                    f"loss.advantage must give {len(grades.rewards)} finite numbers for a group, not {values}."
                )
        return every

    def _item(self, group: GradedGroup, advantages: tuple[float, ...]) -> TrainItem:
        grades = group.grades
        if self._leaves_out(advantages):
            grades = replace(grades, valid=(False,) * len(grades.valid))
        num_trained = self._algorithm.num_trained_tokens(grades)
        num_sequences = self._algorithm.num_sequences(grades)
        remote = RemoteGroup(group.samples, advantages, grades.valid)
        return TrainItem(remote, num_trained, self._cost(group, grades, advantages), num_sequences)

    def _leaves_out(self, advantages: Sequence[float]) -> bool:
        return self._drops_zero_variance and not any(advantages)

    def _cost(self, group: GradedGroup, grades: GroupGrades, advantages: tuple[float, ...]) -> float:
        """Return what a learner computes of a group, in tokens: what balances learners, and decides nothing else."""
        rollouts = zip(grades.num_completion_tokens, grades.valid, advantages, strict=True)
        computed = [n for n, valid, own in rollouts if valid and (own or not self._leaves_out_still)]
        return cost(len(group.prompt.token_ids), computed, is_shared=self._shares_prompts)


class DemonstrationBatches:
    """Demonstrations, `sft.batch_size` for each step."""

    def __init__(self, config: Config, stream: DemonstrationStream, next_ordinal: int) -> None:
        self._stream = stream
        self._batch_size = config.sft.batch_size
        self._num_minibatches = config.train.num_minibatches
        self._next_ordinal = next_ordinal

    def start(self, policy_version: int) -> None:
        """Do nothing: what engines hold is no matter here."""

    def take_step(self, policy_version: int, timer: StepTimer) -> Batch:
        ordinals = range(self._next_ordinal, self._next_ordinal + self._batch_size)
        self._next_ordinal = ordinals.stop
        sequences = [demonstration_sequence(self._stream.demonstration(ordinal)) for ordinal in ordinals]
        items = [
            TrainItem(each, each.num_trained_tokens, cost(0, [len(each.token_ids)], is_shared=False))
            for each in sequences
        ]
        num_tokens = sum(item.num_trained_tokens for item in items)
        metrics = {"tokens/completion_mean": num_tokens / len(items), "tokens/completion_total": float(num_tokens)}
        return Batch(_split(items, self._num_minibatches), ordinals, metrics)


def _split(items: Sequence[TrainItem], num_minibatches: int) -> list[Sequence[TrainItem]]:
    """Deal a step's items out to its optimizer steps."""
    return [items[index::num_minibatches] for index in range(num_minibatches)]


def _measured(groups: Sequence[GradedGroup]) -> list[RemoteGroup]:
    """Choose a fixed share of all completions of a step, whether they are trained on or not; at least one."""
    sizes = [(group.samples, len(group.grades.rewards)) for group in groups]
    every = [(samples, size, index) for samples, size in sizes for index in range(size)]
    return [
        RemoteGroup(samples, (0.0,) * size, tuple(index == own for own in range(size)))
        for samples, size, index in every[::_MEASURED_EVERY]
    ]


def _lengths(groups: Sequence[GradedGroup]) -> dict[str, float]:
    """Average the tokens of prompts, and of prompts with their completions, over all rollouts."""
    lengths = [(len(group.prompt.token_ids), own) for group in groups for own in group.grades.num_completion_tokens]
    prompts = sum(prompt for prompt, _ in lengths) / len(lengths)
    return {
        "tokens/prompt_mean": prompts,
        "tokens/sequence_mean": prompts + sum(own for _, own in lengths) / len(lengths),
    }


def _lines(group: GradedGroup, advantages: Sequence[float] | None) -> list[dict[str, Any]]:
    """Describe each rollout of a group whose texts were kept (`rollout.logged_fraction`); no advantages: dropped."""
    grades = group.grades
    return [
        {
            "ordinal": group.prompt.ordinal,
            "source": group.prompt.source,
            "sample": index,
            "prompt": group.prompt.text,
            "completion": text,
            "reward": grades.rewards[index],
            "rewards": {name: parts[index] for name, parts in grades.reward_parts.items()},
            "valid": grades.valid[index],
            "over_budget": grades.over_budget[index] if grades.over_budget else "",
            "advantage": advantages[index] if advantages is not None else None,
            "tokens": grades.num_completion_tokens[index],
            "truncated": grades.truncated[index],
            "policy_version": grades.min_policy_versions[index],
        }
        for index, text in enumerate(grades.texts)
    ]
