"""GRPO: compares the rewards of the rollouts of one prompt with each other."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_grpo.algorithms.advantages import AdvantageFunction
from hpc_grpo.algorithms.base import Algorithm
from hpc_grpo.algorithms.losses.base import PolicyLoss
from hpc_grpo.algorithms.objective import find_objective
from hpc_grpo.registry import ADVANTAGES, ALGORITHMS
from hpc_grpo.types import GroupGrades, Needs


@ALGORITHMS.register("grpo")
class Grpo(Algorithm):
    """DeepSeekMath, arXiv:2402.03300; `loss.advantage` and `loss.name` choose its two parts."""

    @property
    def needs(self) -> Needs:
        return Needs(rollouts=True, reference=self.config.loss.kl_coef > 0.0)

    @property
    def items_per_step(self) -> int:
        return self.config.rollout.prompts_per_step

    @property
    def episodes_per_item(self) -> int:
        return self.config.rollout.group_size

    def find_loss(self) -> PolicyLoss:
        return find_objective(self.config.loss)

    def advantages(self, grades: GroupGrades) -> Sequence[float]:
        advantage: AdvantageFunction = ADVANTAGES.find(self.config.loss.advantage)
        return advantage(grades.rewards, grades.valid, self.config.loss.normalize_std)
