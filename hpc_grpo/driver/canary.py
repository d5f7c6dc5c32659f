"""The canary: proof that engines sample from the weights just published.

After a publish every engine completes one probe prompt, on the same path and through the same prefix cache as
rollouts, and the learners score what it said. Two things end the run: both are further apart than the bound of their
precision, or an engine repeats itself to the last bit while the learners have moved. The second finds an engine that
keeps its old weights, or a cache made with them, long before they are far from the new ones. A probe has so few tokens
that they may come to the driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_grpo.config import Config
from hpc_grpo.errors import WeightSyncError
from hpc_grpo.types import Completion, GroupRequest, Prompt, SamplingSpec

if TYPE_CHECKING:
    from hpc_grpo.types import Float32Array

_MAX_PROMPT_TOKENS = 64
_NUM_TOKENS = 4
_BOUNDS = {"float32": 0.05, "bfloat16": 1.0}
"""Nats. Sound engines, whose kernels are not the learner's, are 1e-5 apart in float32, and 0.03 in bfloat16."""
_MOVED = {"float32": 1e-4, "bfloat16": 0.05}
"""Nats by which the learners' logprob of a token moves before an engine that stands still is stale.

Smaller moves may be rounded away on its side.
"""


@dataclass(frozen=True)
class _Seen:
    """Keeps what an engine said, and how the learners scored it when it first said that; logprobs `[C]` in nats."""

    completion: Completion
    learner_logprobs: Float32Array

    def says_the_same(self, completion: Completion) -> bool:
        return np.array_equal(self.completion.token_ids, completion.token_ids) and np.array_equal(
            self.completion.engine_logprobs, completion.engine_logprobs
        )


class Canary:
    """Judges the answers of all engines to one probe, publish by publish."""

    def __init__(self, config: Config, prompt: Prompt) -> None:
        """`prompt` is any of the run's; its end is the probe."""
        is_exact = config.model.dtype == config.engine_dtype == "float32"
        precision = "float32" if is_exact else "bfloat16"
        self._bound = _BOUNDS[precision]
        self._moved = _MOVED[precision]
        self._seen: dict[object, _Seen] = {}
        sampling = SamplingSpec(_NUM_TOKENS, temperature=config.rollout.temperature)
        token_ids = prompt.token_ids[-_MAX_PROMPT_TOKENS:]
        self.request = GroupRequest(prompt.ordinal, token_ids, (config.run.seed,), sampling, is_urgent=True)

    def judge(self, engine: object, completion: Completion, learner_logprobs: Float32Array, version: int) -> float:
        """Return how far engine and learners are apart, in nats a token.

        `engine` is any key that is another one after the engine was started anew. Raises WeightSyncError where it does
        not sample from the weights of `version`.
        """
        if not (completion.policy_versions == version).all():
            held = completion.policy_versions[0]
            raise WeightSyncError(f"An engine holds weight version {held} after the publish of version {version}.")
        own = completion.engine_logprobs
        distance = float(np.abs(own - learner_logprobs).mean())
        both = f"logprobs of the probe: engine {_shown(own)}, learner {_shown(learner_logprobs)}"
        if not distance <= self._bound:
            raise WeightSyncError(
                f"An engine does not sample from weight version {version}: it is {distance:.3g} nats a token from the "
                f"learner, more than {self._bound:g} ({both})."
            )
        before = self._seen.get(engine)
        if before is None or not before.says_the_same(completion):
            self._seen[engine] = _Seen(completion, learner_logprobs)
            return distance
        moved = float(np.abs(learner_logprobs - before.learner_logprobs).max())
        if moved > self._moved:
            raise WeightSyncError(
                f"An engine keeps old weights after the publish of version {version}: it gives the logprobs that it "
                f"gave before, while the learner's moved by {moved:.3g} nats ({both})."
            )
        return distance


def _shown(logprobs: Float32Array) -> str:
    return " ".join(f"{value:.4f}" for value in logprobs)
