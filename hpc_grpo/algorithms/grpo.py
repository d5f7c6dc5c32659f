"""GRPO: compares the rewards of the rollouts of one prompt with each other."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_grpo.algorithms.advantages import overlong_penalty
from hpc_grpo.algorithms.base import Algorithm
from hpc_grpo.algorithms.objective import Objective, policy_objective
from hpc_grpo.registry import ALGORITHMS
from hpc_grpo.types import GroupGrades, Needs


@ALGORITHMS.register("grpo")
class Grpo(Algorithm):
    """DeepSeekMath, arXiv:2402.03300; `loss.advantage` and `loss.name` choose its two parts."""

    @property
    def needs(self) -> Needs:
        return Needs(rollouts=True, reference=self.config.loss.kl.coef > 0.0)

    @property
    def items_per_step(self) -> int:
        return self.config.rollout.prompts_per_step

    @property
    def episodes_per_item(self) -> int:
        return self.config.rollout.group_size

    def objective(self) -> Objective:
        return policy_objective(self.config.loss)

    def shaped_rewards(self, grades: GroupGrades) -> Sequence[float]:
        """Return the rewards `[G]` with the penalty of `rollout.overlong_tokens`."""
        longest, buffer = self.config.rollout.max_new_tokens, self.config.rollout.overlong_tokens
        if buffer is None:
            return grades.rewards
        penalties = (overlong_penalty(n, longest, buffer) for n in grades.num_completion_tokens)
        return [reward + penalty for reward, penalty in zip(grades.rewards, penalties, strict=True)]

    def advantages(self, grades: GroupGrades) -> Sequence[float]:
        return self.config.loss.advantage.of_group(self.shaped_rewards(grades), grades.valid)

    def teaches(self, grades: GroupGrades) -> bool:
        if not self.config.loss.advantage.compares_groups:
            return super().teaches(grades)
        pairs = zip(self.shaped_rewards(grades), grades.valid, strict=True)
        return len({reward for reward, valid in pairs if valid}) > 1

    def step_advantages(self, step: Sequence[GroupGrades]) -> Sequence[Sequence[float]]:
        rewards = [self.shaped_rewards(grades) for grades in step]
        return self.config.loss.advantage.of_step(rewards, [grades.valid for grades in step])
