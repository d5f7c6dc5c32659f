"""PPO: a critic in the learner values every token, and makes the advantages from the rewards."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_grpo.algorithms.grpo import Grpo
from hpc_grpo.registry import ALGORITHMS
from hpc_grpo.types import GroupGrades, Needs


@ALGORITHMS.register("ppo")
class Ppo(Grpo):
    """arXiv:1707.06347, with generalised advantages (arXiv:1506.02438); `loss.name` is its policy loss.

    A rollout leaves the driver with its reward as the advantage of each token: `learner/critic.py` takes the last
    one for the reward of the episode.
    """

    @property
    def needs(self) -> Needs:
        return Needs(rollouts=True, reference=self.config.loss.kl.coef > 0.0, critic=True)

    def advantages(self, grades: GroupGrades) -> Sequence[float]:
        shaped = self.shaped_rewards(grades)
        return [reward if valid else 0.0 for reward, valid in zip(shaped, grades.valid, strict=True)]

    def step_advantages(self, step: Sequence[GroupGrades]) -> Sequence[Sequence[float]]:
        return [self.advantages(grades) for grades in step]
