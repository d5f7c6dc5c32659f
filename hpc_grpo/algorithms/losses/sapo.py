"""SAPO: a soft gate in the place of the clip."""

from __future__ import annotations

from hpc_grpo.algorithms.losses.base import LossInputs, LossOutput
from hpc_grpo.algorithms.losses.common import ratio_metrics, token_ratios
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import LOSSES


@LOSSES.register("sapo", gate_temperatures=(1.0, 1.05), denominator="sequences", scales_advantage=True)
def sapo_loss(inputs: LossInputs, settings: LossConfig) -> LossOutput:
    """Return the SAPO loss per token `[C]` (arXiv:2511.20347, eq. 5 and 6).

    L = -f(r) * A,   f(r) = 4 / tau * sigmoid(tau * (r - 1)),   r = exp(learner_logprobs - proximal_logprobs)
    tau = gate_temperatures[0] where A > 0, else gate_temperatures[1]

    At r = 1 its gradient is that of r * A, and falls off on both sides: no token is clipped.
    """
    if settings.gate_temperatures is None:
        raise ValueError("sapo needs loss.gate_temperatures")
    ratio = token_ratios(inputs)
    positive, negative = (ratio.new_full((), tau) for tau in settings.gate_temperatures)
    tau = positive.where(inputs.advantages > 0, negative)
    gate = 4.0 / tau * (tau * (ratio - 1.0)).sigmoid()
    return LossOutput(-gate * inputs.advantages, ratio_metrics(ratio, ratio < 0.0))
