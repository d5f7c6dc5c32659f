"""The driver's face of all learners together: each call reaches every one of them.

Consumes graded groups or demonstrations; produces merged metrics. The split over learners balances tokens, and
does not change the gradient, since the loss is normalised by the tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray

from hpc_grpo.algorithms.base import algorithm_of
from hpc_grpo.config import Config
from hpc_grpo.driver.remote import get_all
from hpc_grpo.driver.sampling import GradedGroup
from hpc_grpo.learner.actor import RemoteGroup, RemoteMinibatch
from hpc_grpo.learner.rendezvous import Rendezvous
from hpc_grpo.metrics.reductions import merge
from hpc_grpo.run.checkpoint import Checkpoint
from hpc_grpo.run.files import recover_dirs
from hpc_grpo.types import Minibatch, TrainSequence

T = TypeVar("T")


class LearnerGroup:
    """All learners of the run, by rank."""

    def __init__(self, config: Config, learners: Sequence[Any]) -> None:
        self._config = config
        self._learners = learners
        self._algorithm = algorithm_of(config)
        self._rendezvous: Any = None  # an actor lives as long as its creator holds it

    def start(self) -> None:
        """Let the learners meet, load the model and build their optimizers."""
        if len(self._learners) > 1:
            self._rendezvous = ray.remote(Rendezvous).options(num_cpus=0).remote()
        self._on_all("start", self._rendezvous, waiting_for="the learners")

    def train_on_groups(self, groups: Sequence[GradedGroup]) -> dict[str, float]:
        """One step of `train.num_minibatches` optimizer steps."""
        num_minibatches = self._config.train.num_minibatches
        per_minibatch = [groups[index::num_minibatches] for index in range(num_minibatches)]
        shares: list[list[RemoteMinibatch]] = [[] for _ in self._learners]
        for minibatch in per_minibatch:
            num_valid_tokens = sum(_num_valid_tokens(group) for group in minibatch)
            split = balanced(minibatch, [_num_valid_tokens(group) for group in minibatch], len(self._learners))
            for share, part in zip(shares, split, strict=True):
                share.append(RemoteMinibatch(tuple(self._remote(group) for group in part), num_valid_tokens))
        calls = [learner.train_on_groups.remote(share) for learner, share in zip(self._learners, shares, strict=True)]
        return merge(get_all(calls, None, "the training step"))

    def train_on_sequences(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """One optimizer step on demonstrations."""
        num_tokens = sum(sequence.num_trained_tokens for sequence in sequences)
        split = balanced(sequences, [len(sequence.token_ids) for sequence in sequences], len(self._learners))
        calls = [
            learner.train_on_sequences.remote(Minibatch(tuple(part), num_tokens))
            for learner, part in zip(self._learners, split, strict=True)
        ]
        return merge(get_all(calls, None, "the training step"))

    def save_checkpoint(self, path: Path, driver_state: dict[str, Any]) -> None:
        self._on_all("save_checkpoint", path, driver_state, waiting_for="the checkpoint")

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint, of as many learners or of another number.

        Raises ConfigError if it does not fit the config, LaunchError if there is no space to rewrite it.
        """
        is_resharded = checkpoint.manifest.world_size != len(self._learners)
        if is_resharded:
            print(f"Rewriting {checkpoint.path.name} for {len(self._learners)} learners.", flush=True)
            get_all([self._learners[0].write_universal.remote(checkpoint.path)], None, "rewriting the checkpoint")
        self._on_all("load_checkpoint", checkpoint.path, waiting_for="loading the checkpoint")
        if is_resharded:
            recover_dirs(checkpoint.path.parent)

    def export(self, path: Path) -> None:
        self._on_all("export", path, waiting_for="the export")

    def _on_all(self, method: str, *args: Any, waiting_for: str) -> None:
        get_all([getattr(learner, method).remote(*args) for learner in self._learners], None, waiting_for)

    def _remote(self, group: GradedGroup) -> RemoteGroup:
        return RemoteGroup(group.samples, self.advantages(group), group.grades.valid)

    def advantages(self, group: GradedGroup) -> tuple[float, ...]:
        return tuple(self._algorithm.advantages(group.grades))


def balanced(items: Sequence[T], sizes: Sequence[int], num_parts: int) -> list[list[T]]:
    """Split into parts of about equal total size: the largest first, each to the part that has least.

    >>> balanced("abcd", [5, 1, 3, 3], 2)
    [['a', 'b'], ['c', 'd']]
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0] * num_parts
    for index in sorted(range(len(items)), key=lambda i: (-sizes[i], i)):
        smallest = totals.index(min(totals))
        parts[smallest].append(index)
        totals[smallest] += sizes[index]
    return [[items[index] for index in sorted(part)] for part in parts]


def _num_valid_tokens(group: GradedGroup) -> int:
    grades = group.grades
    return sum(n for n, valid in zip(grades.num_completion_tokens, grades.valid, strict=True) if valid)
