"""A loss of one's own: the plain policy gradient, and a pull back to the policy that the step began with, for a clip.

    hpc-grpo train CONFIG loss=examples/proximal_pull_loss.py:proximal_pull loss.args='{strength: 0.1}'

A loss gives one number for each trained token. The engine's mismatch, the KL, the entropy bonus and what divides the
sum are added around it, by the other keys of `loss`.
"""

from hpc_grpo.algorithms.terms import LossInputs, LossOutput


def proximal_pull(inputs: LossInputs, strength: float = 0.1) -> LossOutput:
    """Return -A * logprob + strength / 2 * (log ratio)^2 for each token `[C]` (Kimi k1.5, arXiv:2501.12599, eq. 3)."""
    log_ratio = inputs.learner_logprobs - inputs.proximal_logprobs
    pull = strength / 2 * log_ratio.square()
    per_token = pull - inputs.advantages * inputs.learner_logprobs
    return LossOutput(per_token, means={"policy/pull": pull.detach()})
