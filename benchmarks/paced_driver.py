"""The driver with engines and learners that take as long as `PACE` says, however many share the machine's cores.

Both are real and as small as can be, and sleep for the rest of their time; what is left is the driver's, Ray's, the
weight sync's and the place's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import ray

from hpc_grpo.config import Config
from hpc_grpo.driver import actors as workers
from hpc_grpo.driver import main as train
from hpc_grpo.engine.actor import Engine
from hpc_grpo.learner.actor import LearnerActor
from hpc_grpo.types import Minibatch

PACE = {"decode_s": 0.024, "sequence_s": 0.001, "train_s": 0.2, "token_s": 0.002}
"""Seconds of a decode step and more for each sequence in it; of a learner's step and more for each of its tokens."""

_MORE_STOPS = tuple(range(97, 107))
"""End tokens beside the model's own: completions of random weights have 23 tokens on average, geometrically."""


class PacedEngine(Engine):
    def __init__(self, config: Config, stop_token_ids: Sequence[int], **options: Any) -> None:
        self._slots = config.engine.max_num_seqs
        super().__init__(config, (*stop_token_ids, *_MORE_STOPS), **options)

    async def ready(self) -> None:
        await super().ready()
        sampler = self._loop.wait_ready()
        step = sampler.step

        def paced() -> None:
            begun, running = time.monotonic(), min(len(sampler._pending), self._slots)
            step()
            sleep_until(begun + PACE["decode_s"] + PACE["sequence_s"] * running)

        sampler.step = paced  # type: ignore[method-assign]


class PacedLearner(LearnerActor):
    def train(self, minibatches: Sequence[Minibatch], record: Any) -> Any:
        begun = time.monotonic()
        groups = ray.get([item.samples for minibatch in minibatches for item in minibatch.sequences])
        tokens = sum(episode.num_sampled_tokens for group in groups for episode in group.episodes)
        metrics = super().train(minibatches, record)
        sleep_until(begun + PACE["train_s"] + PACE["token_s"] * tokens)
        return metrics


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


if __name__ == "__main__":
    workers.Engine = PacedEngine  # type: ignore[misc]
    workers.LearnerActor = PacedLearner  # type: ignore[misc]
    sys.exit(train.main())
