"""The driver's handle on all learners together: each call reaches every one of them.

Waits for the slowest learner. The split over learners balances cost, and does not change the gradient, since the loss
is normalised by the tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from hpc_grpo.driver.batches import Batch, balanced
from hpc_grpo.driver.remote import get_all
from hpc_grpo.learner.actor import WRITING
from hpc_grpo.learner.rendezvous import Rendezvous
from hpc_grpo.metrics.reductions import merge
from hpc_grpo.run.checkpoint import Checkpoint
from hpc_grpo.run.files import recover_dirs
from hpc_grpo.types import RemoteMinibatch


class LearnerGroup:
    """All learners of the run, by rank."""

    def __init__(self, learners: Sequence[Any]) -> None:
        self._learners = learners
        self._rendezvous: Any = None  # an actor lives as long as its creator holds it

    def start(self) -> None:
        """Let the learners meet, load the model and build their optimizers."""
        if len(self._learners) > 1:
            self._rendezvous = ray.remote(Rendezvous).options(num_cpus=0).remote()
        self._on_all("start", self._rendezvous, waiting_for="the learners")

    def train(self, batch: Batch, record: Path | None = None) -> dict[str, float]:
        """Take one optimizer step for each minibatch; return the metrics of all learners together.

        The batch is kept in the folder `record`, if there is to be one.
        """
        shares: list[list[RemoteMinibatch]] = [[] for _ in self._learners]
        for minibatch in batch.minibatches:
            num_tokens = sum(item.num_trained_tokens for item in minibatch)
            num_sequences = sum(item.num_sequences for item in minibatch)
            split = balanced(minibatch, [item.cost for item in minibatch], len(self._learners))
            for share, part in zip(shares, split, strict=True):
                share.append(RemoteMinibatch(tuple(item.data for item in part), num_tokens, num_sequences))
        num, measured = len(self._learners), batch.measured
        own = [measured[rank::num] if measured else None for rank in range(num)]
        told = zip(self._learners, shares, own, strict=True)
        calls = [learner.train.remote(share, record, some) for learner, share, some in told]
        return merge(get_all(calls, None, "the training step"))

    def begin_checkpoint(self, path: Path, driver_state: dict[str, Any], *, behind: bool) -> Any:
        """Stage a checkpoint and have it written; return what `seconds_of` awaits. If `behind`, training may go on."""
        self._on_all("stage_checkpoint", path, driver_state, behind, waiting_for="the checkpoint")
        shares = [learner.write_checkpoint.options(concurrency_group=WRITING).remote() for learner in self._learners]
        return self._learners[0].publish_checkpoint.options(concurrency_group=WRITING).remote(*shares)

    def seconds_of(self, writing: Any, *, waits: bool) -> float | None:
        """Return how long a checkpoint took that is published by now; None if it is not and nobody `waits` for it."""
        if not waits and not ray.wait([writing], timeout=0)[0]:
            return None
        (seconds,) = get_all([writing], None, "the checkpoint")
        return float(seconds)

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint of any number of learners. Raises LaunchError if there is no space to rewrite it."""
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
