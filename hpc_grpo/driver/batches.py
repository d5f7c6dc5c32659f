"""Builds the batches of training steps, whose items are groups of rollouts or demonstrations.

Token arrays of rollouts stay in the object store; an item holds references. `take_step` waits for engines and graders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from hpc_grpo.algorithms.advantages import as_advantage, has_signal, of_each_turn
from hpc_grpo.algorithms.tasks import algorithm_of, demonstration_sequence
from hpc_grpo.config import Config
from hpc_grpo.config.resources import budget_of
from hpc_grpo.driver.rollouts import GradedGroup, RolloutScheduler
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.split import cost
from hpc_grpo.metrics.record import StepTimer
from hpc_grpo.metrics.rollouts import lines_of_turns, rollout_metrics, selection_metrics
from hpc_grpo.types import Advantage, GroupGrades, RemoteGroup, TrainSequence

if TYPE_CHECKING:
    from hpc_grpo.data.curriculum import Known
    from hpc_grpo.data.stream import DemonstrationStream

T = TypeVar("T")

_MEASURED_EVERY = 16
"""One of this many completions measures the mismatch of engine and learner: enough for a mean, and cheap."""


@dataclass(frozen=True)
class TrainItem:
    """A group or a demonstration. One learner trains on it; its `cost` in tokens balances the learners' shares."""

    data: RemoteGroup | TrainSequence
    num_trained_tokens: int
    cost: float
    num_sequences: int = 1


@dataclass(frozen=True)
class Batch:
    """A step's items for each optimizer step, its ordinals without a gap, and the lines of rollouts/step_N.jsonl.

    The step sampled the `dropped` ordinals but does not train on them. It did not sample the ordinals `passed_over`.
    `curriculum` is the curriculum's state after the step. `ahead` are the ordinals chosen for later steps
    (`RolloutScheduler.ahead`). `measured` holds the completions that measure the mismatch of engine and learner. Each
    one is a group with one valid rollout.
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


class RolloutBatches:
    """Builds each step's batch from groups of rollouts and the advantages of the run's algorithm."""

    def __init__(self, config: Config, scheduler: RolloutScheduler) -> None:
        self._config, self._scheduler = config, scheduler
        self._algorithm = algorithm_of(config)
        needs = config.needs
        self._skips_zero_advantages = config.loss.is_still_without_advantage and not (
            needs.reference or needs.teacher or needs.critic or config.train.router_aux_loss_coef
        )
        self._shares_prompts = budget_of(config).shares_prompts
        self._has_several_sources = len(config.data.sources(for_eval=False)) > 1

    def start(self, policy_version: int) -> None:
        """Start all prompts that the lag bound allows once engines hold this version."""
        self._scheduler.start_prompts(policy_version)

    def take_step(self, policy_version: int, timer: StepTimer) -> Batch:
        """Wait for the step's groups and return its batch.

        Raises ConfigError unless a user's advantages are one finite number for each rollout or turn. Also raises the
        errors of `RolloutScheduler.take_step`.
        """
        with timer.phase("generate_wait"):
            step = self._scheduler.take_step(policy_version)
        scheduler, sampled, curriculum = self._scheduler, step.sampled, self._scheduler.curriculum
        given = self._algorithm.step_advantages([group.grades for group in step.trained]) if step.trained else ()
        advantages = [tuple(map(as_advantage, own)) for own in given]
        for group, values in zip(step.trained, advantages, strict=True):
            _check(values, group.grades)
        trained = list(zip(step.trained, advantages, strict=True))
        untaught = [group.grades for group, own in trained if self._is_dropped(own)]
        metrics = {
            **rollout_metrics(
                [group.grades for group in sampled],
                policy_version,
                self._config.eval,
                [group.prompt.source for group in sampled] if self._has_several_sources else (),
            ),
            **_lengths(sampled),
            **selection_metrics(
                len(sampled), len(step.passed_over), [*(group.grades for group in step.dropped), *untaught]
            ),
            **(curriculum.metrics() if curriculum else {}),
            **scheduler.pool.restarts(),
        }
        sizes = [(group.samples, len(group.grades.rewards)) for group in sampled]
        every = [(samples, size, at) for samples, size in sizes for at in range(size)]
        return Batch(
            minibatches=_deal([self._item(group, own) for group, own in trained], self._config.train.num_minibatches),
            ordinals=step.ordinals,
            metrics=metrics,
            measured=[
                RemoteGroup(samples, (0.0,) * size, tuple(index == at for index in range(size)))
                for samples, size, at in every[::_MEASURED_EVERY]
            ],
            lines=[
                line
                for group, own in (*trained, *((group, None) for group in step.dropped))
                for line in _lines(group, own)
            ],
            dropped=[group.prompt.ordinal for group in step.dropped],
            passed_over=step.passed_over,
            curriculum=curriculum.known if curriculum else {},
            ahead=scheduler.ahead,
        )

    def _is_dropped(self, advantages: Sequence[Advantage]) -> bool:
        return self._config.rollout.drop_zero_variance and not has_signal(advantages)

    def _item(self, group: GradedGroup, advantages: tuple[Advantage, ...]) -> TrainItem:
        grades = group.grades
        if self._is_dropped(advantages):
            grades = replace(grades, valid=(False,) * len(grades.valid))
        rollouts = zip(_after_prompt(grades), grades.valid, advantages, strict=True)
        computed = [n for n, valid, own in rollouts if valid and (has_signal([own]) or not self._skips_zero_advantages)]
        return TrainItem(
            RemoteGroup(group.samples, advantages, grades.valid),
            self._algorithm.num_trained_tokens(grades),
            cost(grades.num_prompt_tokens, computed, is_shared=self._shares_prompts),
            self._algorithm.num_sequences(grades),
        )


class DemonstrationBatches:
    """Builds each step's batch from `task.args.batch_size` demonstrations."""

    def __init__(self, config: Config, stream: DemonstrationStream, next_ordinal: int) -> None:
        self._config, self._stream, self._next_ordinal = config, stream, next_ordinal

    def start(self, policy_version: int) -> None:
        """Do nothing: demonstrations need no sampling."""

    def take_step(self, policy_version: int, timer: StepTimer) -> Batch:
        ordinals = range(self._next_ordinal, self._next_ordinal + self._config.task_args.batch_size)
        self._next_ordinal = ordinals.stop
        sequences = [demonstration_sequence(self._stream.demonstration(ordinal)) for ordinal in ordinals]
        items = [
            TrainItem(each, each.num_trained_tokens, cost(0, [len(each.token_ids)], is_shared=False))
            for each in sequences
        ]
        num_tokens = sum(item.num_trained_tokens for item in items)
        metrics = {"tokens/completion_mean": num_tokens / len(items), "tokens/completion_total": float(num_tokens)}
        return Batch(_deal(items, self._config.train.num_minibatches), ordinals, metrics)


def balanced(items: Sequence[T], sizes: Sequence[float], num_parts: int) -> list[list[T]]:
    """Split into parts of about equal total size: take the largest first, each into the smallest part.

    >>> balanced("abcd", [5, 1, 3, 3], 2)
    [['a', 'b'], ['c', 'd']]
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0.0] * num_parts
    for index in sorted(range(len(items)), key=lambda i: (-sizes[i], i)):
        smallest = totals.index(min(totals))
        parts[smallest].append(index)
        totals[smallest] += sizes[index]
    return [[items[index] for index in sorted(part)] for part in parts]


def _deal(items: Sequence[TrainItem], num_minibatches: int) -> list[Sequence[TrainItem]]:
    return [items[index::num_minibatches] for index in range(num_minibatches)]


def _lengths(groups: Sequence[GradedGroup]) -> dict[str, float]:
    """Return the mean number of tokens of prompts and of complete sequences, over all rollouts."""
    lengths = [(group.grades.num_prompt_tokens, own) for group in groups for own in _after_prompt(group.grades)]
    prompts, others = (sum(each) / len(lengths) for each in zip(*lengths, strict=True))
    return {"tokens/prompt_mean": prompts, "tokens/sequence_mean": prompts + others}


def _after_prompt(grades: GroupGrades) -> list[int]:
    """Count each rollout's tokens after its first prompt, including the environment's."""
    observed = grades.num_observed_tokens or (0,) * len(grades.rewards)
    return [sum(each) for each in zip(grades.num_completion_tokens, observed, strict=True)]


def _check(advantages: Sequence[Advantage], grades: GroupGrades) -> None:
    num_turns = [len(own) for own in grades.turn_rewards] or [1] * len(grades.rewards)
    spread = [of_each_turn(own, num) for own, num in zip(advantages, num_turns, strict=False)]
    is_as_long = [len(advantages), *map(len, spread)] == [len(num_turns), *num_turns]
    if not is_as_long or not all(map(math.isfinite, chain(*spread))):
        raise ConfigError(
            f"loss.advantage must give {len(num_turns)} finite numbers for a group, or for a rollout a tuple with "
            f"one for each of its turns ({num_turns} turns), not {tuple(advantages)}."
        )


def _lines(group: GradedGroup, advantages: Sequence[Advantage] | None) -> Iterator[dict[str, Any]]:
    """Yield a line for each rollout whose text was kept (`rollout.logged_fraction`). None: a dropped group."""
    grades, turns = group.grades, lines_of_turns(group.grades)
    for index, text in enumerate(grades.texts):
        yield {
            "ordinal": group.prompt.ordinal,
            "source": group.prompt.source,
            "sample": index,
            "prompt": grades.shown_prompt or group.prompt.text,
            "answer": group.prompt.fields.get("answer"),
            "completion": text,
            "reward": grades.rewards[index],
            "rewards": {name: parts[index] for name, parts in grades.reward_parts.items()},
            "valid": grades.valid[index],
            "over_budget": grades.over_budget[index] if grades.over_budget else "",
            "advantage": advantages[index] if advantages is not None else None,
            "tokens": grades.num_completion_tokens[index],
            "truncated": grades.truncated[index],
            "policy_version": grades.min_policy_versions[index],
            **({"turn_rewards": grades.turn_rewards[index]} if grades.turn_rewards else {}),
            **({"turns": turns[index]} if turns else {}),
            **({"images": grades.thumbnails} if grades.thumbnails and not index else {}),
            **({"failure": grades.failures[index]} if any(grades.failures) else {}),
        }
