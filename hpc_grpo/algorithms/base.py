"""The interface of an algorithm: what a task needs, how its rollouts become training sequences, and its loss.

Whoever has to know what a run consists of asks `config.needs`, never the name of its task.
Importing an algorithm loads neither numpy nor torch: plans and preflight checks on a login node ask for needs too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hpc_grpo.algorithms.objective import Objective
from hpc_grpo.config import Config
from hpc_grpo.registry import ALGORITHMS
from hpc_grpo.types import GroupGrades, GroupSamples, Needs, TrainSequence


class Algorithm(ABC):
    """One per process, made from the config. A step trains on `items_per_step` prompts or demonstrations."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    @abstractmethod
    def needs(self) -> Needs: ...

    @property
    @abstractmethod
    def items_per_step(self) -> int: ...

    @property
    def episodes_per_item(self) -> int:
        """Return the rollouts of one prompt; 1 for a demonstration."""
        return 1

    @abstractmethod
    def objective(self) -> Objective:
        """Return what the learner's optimizer steps minimise."""

    def advantages(self, grades: GroupGrades) -> Sequence[float]:
        """Compute the advantages `[G]` of a whole group, in the driver."""
        raise NotImplementedError(f"{type(self).__name__} trains on no groups")

    def step_advantages(self, step: Sequence[GroupGrades]) -> Sequence[Sequence[float]]:
        """Compute the advantages of all groups of a step; override it where groups are not on their own."""
        return [self.advantages(grades) for grades in step]

    def teaches(self, grades: GroupGrades) -> bool:
        """Tell whether a group has an advantage that is not 0, before the other groups of its step are known."""
        return any(self.advantages(grades))

    def num_trained_tokens(self, grades: GroupGrades) -> int:
        """Count, in the driver, the tokens that `sequences` will train on; override all three together."""
        return sum(n for n, valid in zip(grades.num_completion_tokens, grades.valid, strict=True) if valid)

    def num_sequences(self, grades: GroupGrades) -> int:
        """Count, in the driver, the sequences that `sequences` will make."""
        return sum(grades.valid)

    def sequences(
        self, samples: GroupSamples, advantages: Sequence[float], valid: Sequence[bool]
    ) -> list[TrainSequence]:
        """Make the training sequences of a group's valid rollouts, in the learner's process.

        Each token sampled by the engine is trained on with its rollout's advantage. Override this for advantages that
        differ within a rollout: token arrays never pass through the driver.
        """
        import numpy as np

        prompt_length = len(samples.prompt_token_ids)
        made = []
        for index, (completion, advantage) in enumerate(zip(samples.completions, advantages, strict=True)):
            if not valid[index]:
                continue
            token_ids = np.concatenate([samples.prompt_token_ids, completion.token_ids])
            loss_mask = np.arange(len(token_ids)) >= prompt_length
            engine_logprobs = np.zeros(len(token_ids), dtype=np.float32)
            engine_logprobs[prompt_length:] = completion.engine_logprobs
            versions = np.zeros(len(token_ids), dtype=np.int32)
            versions[prompt_length:] = completion.policy_versions
            own = loss_mask * np.float32(advantage)
            made.append(TrainSequence(samples.ordinal, index, token_ids, loss_mask, own, engine_logprobs, versions))
        return made


def algorithm_of(config: Config) -> Algorithm:
    """Make the algorithm that `task` names. Raises ConfigError where there is none."""
    algorithm: Algorithm = ALGORITHMS.find(config.task.name)(config)
    return algorithm
