"""On-policy distillation: the student samples, and a teacher says of each token how much likelier it had been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_grpo.algorithms.grpo import Grpo
from hpc_grpo.algorithms.objective import Objective, Term, policy_objective
from hpc_grpo.algorithms.terms import LossInputs, LossOutput
from hpc_grpo.registry import ALGORITHMS
from hpc_grpo.types import GroupGrades, Needs


@ALGORITHMS.register("distill")
class Distill(Grpo):
    """Reverse KL to a teacher on the student's own completions (GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543;
    Thinking Machines Lab 2025, "On-Policy Distillation"), by the policy gradient of `loss.name`.

    Rewards count only with `task.reward_coef`, by the advantages of `loss.advantage`.
    """

    @property
    def needs(self) -> Needs:
        reference = self.config.loss.kl.coef > 0.0
        return Needs(rollouts=True, reference=reference, teacher=True, rewards=self.config.distill.reward_coef > 0.0)

    def objective(self) -> Objective:
        return policy_objective(self.config.loss, TaughtTerm(self.config.loss.term, self.config.distill.coef))

    def step_advantages(self, step: Sequence[GroupGrades]) -> Sequence[Sequence[float]]:
        coef = self.config.distill.reward_coef
        if coef == 0.0:
            return [(0.0,) * len(grades.rewards) for grades in step]
        return [[coef * value for value in own] for own in super().step_advantages(step)]


@dataclass(frozen=True)
class TaughtTerm:
    """The term of a policy loss whose advantages are those of the teacher, added to those that came with the tokens."""

    term: Term
    coef: float

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of A_t + coef * (log teacher - log proximal) per token `[C]`.

        The gradient of the reverse KL of a token, as far as one sample tells it, and of no later one: a token answers
        for itself (a discount of 0, as Thinking Machines has it; MiniLLM adds up the rest of the sequence). The
        proximal logprobs stand for the policy's, without gradient; the correction weighs from the engine's to them.
        `kl/learner_teacher` estimates the KL by k1 at tokens that engines sampled. Raises ValueError without a teacher.
        """
        if inputs.teacher_logprobs is None:
            raise ValueError("distillation needs LossInputs.teacher_logprobs")
        gap = (inputs.proximal_logprobs - inputs.teacher_logprobs).detach()
        output = self.term(replace(inputs, advantages=inputs.advantages - self.coef * gap))
        return replace(output, means=output.means | {"kl/learner_teacher": gap})
