"""Section `loss`: a settings class for each choice of `loss.name`, and the keys that all losses share.

A class holds the defaults of its paper; `term` is its formula. `objective.py` adds corrections, KL and entropy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from hpc_grpo.algorithms.advantages import Advantage, GroupAdvantage
from hpc_grpo.algorithms.corrections import Correction, IcePop, IcePopArgs, Truncated
from hpc_grpo.algorithms.terms import LossInputs, LossOutput, kl_k3, ratio_metrics, sequence_ratios, token_ratios
from hpc_grpo.registry import LOSSES
from hpc_grpo.section import ByName, PathText, Section, as_section

if TYPE_CHECKING:
    from torch import Tensor


def _denominator(value: Any) -> Any:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if not is_number and value not in ("tokens", "sequences", "constant"):
        raise ValueError("must be tokens, sequences, constant, or a number of tokens above 0")
    return value


Denominator = Annotated[
    Literal["tokens", "sequences", "constant"] | int,
    BeforeValidator(_denominator),
    Field(
        description=(
            "What divides the sum over a step's tokens. tokens: the number of tokens. sequences: each "
            "sequence's token count, then the number of sequences. constant: rollout.max_new_tokens for "
            "each sequence. A number: that many tokens for each sequence."
        )
    ),
]
Proximal = Literal["recomputed", "interpolated", "engine"]
ClipLow = Annotated[NonNegativeFloat, Field(description="The ratio is clipped below at 1 - clip_low.")]
ClipHigh = Annotated[NonNegativeFloat, Field(description="The ratio is clipped above at 1 + clip_high.")]


class KlSettings(Section):
    coef: NonNegativeFloat = Field(0.0, description="Weight of the KL to the reference; 0: no reference.")
    estimator: Literal["k1", "k2", "k3", "unbiased"] = Field(
        "k3",
        description=(
            "Estimator of the KL. As a loss term, k1 has zero gradient on average. k2 has the KL's "
            "gradient on-policy, unbiased (k3 times the ratio to the engine) also off-policy."
        ),
    )
    where: Literal["loss", "reward"] = Field(
        "loss",
        description="loss: a loss term. reward: each advantage loses coef times the KL of the rest of its sequence.",
    )
    reference: PathText | None = Field(
        None, description="Folder of the reference, with the tokenizer of model.path. Default: model.path."
    )
    refresh_steps: PositiveInt | None = Field(
        None, description="Update the reference from the policy every N steps. Default: the reference is frozen."
    )
    mixup: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description=(
            "Weight of the policy when the reference is refreshed. 1 copies the policy; less keeps an "
            "exponential average in float32."
        ),
    )

    @property
    def averages(self) -> bool:
        """Return whether the reference is an exponential average of the policy."""
        return self.refresh_steps is not None and self.mixup < 1.0


class LossSettings(Section):
    """Keys that every policy loss has."""

    name: str
    denominator: Denominator = "tokens"
    proximal: Proximal = Field(
        "recomputed",
        description=(
            "Source of the proximal logprobs, the ratio's denominator. recomputed: the learner computes them at the "
            "step's start. interpolated: from the second minibatch on, values between the engine's and the learner's "
            "by version (AReaL's loglinear, at the step's start). engine: the engine's, so the correction is 1."
        ),
    )
    entropy_coef: NonNegativeFloat = Field(
        0.0, description="Weight of the entropy bonus. 0: no bonus. Its gradient needs as much memory as the logits."
    )
    correction: Correction = Truncated()
    advantage: Advantage = GroupAdvantage()
    kl: KlSettings = Field(KlSettings(), description="The KL to a reference model.")

    scales_advantage: ClassVar[bool] = True
    """Whether a token of advantage 0 has no gradient and does not change other tokens' gradients."""
    compares_minibatch: ClassVar[bool] = False
    """Whether `prepare` is called, with all tokens and advantages of an optimizer step, before `term`."""

    def check(self) -> None:
        """Raise ConfigError if the user's function does not exist or does not take its args."""

    def term(self, inputs: LossInputs) -> LossOutput:
        """Return the policy's own term of the loss per token `[C]`."""
        raise NotImplementedError

    def prepare(self, minibatch: LossInputs) -> Any:
        """Return the value that `term` reads from `inputs.of_minibatch` under the loss's name."""
        raise NotImplementedError

    @property
    def is_still_without_advantage(self) -> bool:
        """Return whether a token of advantage 0 has no gradient and changes no other token's gradient.

        Ignores the KL to a reference: callers check whether the run has a reference. Returns False for a user's
        correction, which may depend on other tokens. Also returns False with an entropy bonus, and for a term or a
        correction that compares all tokens of an optimizer step.
        """
        compares = self.compares_minibatch or self.correction.compares_minibatch
        is_built_in = ":" not in self.correction.name
        return self.scales_advantage and is_built_in and not compares and not self.entropy_coef

    @property
    def functions(self) -> dict[str, str]:
        """Return each key that names a function, with the name: a built-in's, or the user's `module:function`."""
        chosen = {"loss": self.name, "loss.advantage": self.advantage.name, "loss.correction": self.correction.name}
        return {f"{key}.name": name for key, name in chosen.items()}

    @model_validator(mode="before")
    @classmethod
    def _with_defaults_of_loss(cls, values: Any) -> Any:
        """Set this loss's defaults for correction and advantage. Keys that the user has set stay."""
        if not isinstance(values, Mapping):
            return values
        completed = dict(values)
        for key in ("correction", "advantage"):
            chosen, default = as_section(values.get(key)), cls.model_fields[key].default
            if isinstance(chosen, Mapping) and chosen.get("name", default.name) == default.name:
                completed[key] = {**(own := default.model_dump()), **chosen}
                if isinstance(args := chosen.get("args"), Mapping):
                    completed[key]["args"] = {**own.get("args", {}), **args}
        return completed


class ClippedArgs(Section):
    dual_clip: PositiveFloat | None = Field(
        None, gt=1.0, description="Largest ratio that counts for a negative advantage, such as 3. Default: no limit."
    )


class _Clipped(LossSettings):
    """Base class of PPO's surrogate with a clip range (arXiv:1707.06347). r is the ratio to the proximal policy.

    L = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
    L = min(L, -dual_clip * A) where A < 0      (dual clip, arXiv:1912.09729), with `dual_clip`
    """

    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    args: ClippedArgs = ClippedArgs()

    def ratio(self, inputs: LossInputs) -> Tensor:
        """Return r = exp(learner_logprobs - proximal_logprobs) `[C]`."""
        return token_ratios(inputs)

    def term(self, inputs: LossInputs) -> LossOutput:
        ratio, advantages = self.ratio(inputs), inputs.advantages
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        policy = -(ratio * advantages).minimum(ratio.clamp(low, high) * advantages)
        is_negative = advantages < 0
        is_clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & is_negative)
        if (most := self.args.dual_clip) is not None:
            policy = policy.minimum(-most * advantages).where(is_negative, policy)
            is_clipped = is_clipped | ((ratio > most) & is_negative)
        return LossOutput(policy, ratio_metrics(ratio, is_clipped))


class GrpoLoss(_Clipped):
    """GRPO (DeepSeekMath, arXiv:2402.03300).

    Differs from the paper in two points, both from DAPO (arXiv:2503.14476). clip_high may differ from clip_low. The sum
    over tokens is divided by the optimizer step's valid tokens, not first by each completion's length. The paper's
    division is `loss.denominator: sequences`.
    """

    name: Literal["grpo"] = "grpo"


class BnpoLoss(_Clipped):
    """`grpo` with its default denominator, under the name that TRL and Liger use.

    TRL and Liger normalize over one microbatch of one process. Here the denominator counts the complete optimizer step.
    """

    name: Literal["bnpo"] = "bnpo"


class DapoLoss(_Clipped):
    """DAPO (arXiv:2503.14476, eq. 8): a token-level mean, with a larger clip range above 1 than below.

    DAPO's other parts have their own keys: `rollout.overlong_tokens`, `rollout.drop_zero_variance`, `loss.kl.coef: 0`.
    """

    name: Literal["dapo"] = "dapo"
    clip_high: ClipHigh = 0.28


class DrGrpoLoss(_Clipped):
    """Dr. GRPO (arXiv:2503.20783): GRPO without its biases towards long wrong answers and towards easy or hard prompts.

    A = r_i - mean(r), without the standard deviation. The sum over each sequence is divided by one constant, the
    largest completion length, as in TRL and in the authors' code.
    """

    name: Literal["dr_grpo"] = "dr_grpo"
    denominator: Denominator = "constant"
    advantage: Advantage = GroupAdvantage(normalize_std=False)


class DecoupledPpoLoss(_Clipped):
    """Decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298, eq. 5): clips around a proximal policy.

    L = -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
    w = exp(proximal_logprobs - engine_logprobs) where this ratio is at most the correction's cap, else 0

    w is the correction: `icepop` without its lower bound. `loss.proximal` chooses the source of the proximal logprobs.
    """

    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    correction: Correction = IcePop(args=IcePopArgs(low=0.0))


class GspoLoss(_Clipped):
    """GSPO (arXiv:2507.18071, eq. 5 to 7): one ratio for all tokens of a sequence.

    s = exp(mean over the sequence's tokens of learner_logprobs - proximal_logprobs)

    All tokens of a sequence share one s. `denominator: sequences` averages over the tokens, which is the paper's term.
    """

    name: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
    denominator: Denominator = "sequences"

    def ratio(self, inputs: LossInputs) -> Tensor:
        return sequence_ratios(inputs)


class GspoTokenLoss(_Clipped):
    """GSPO-token (arXiv:2507.18071, eq. 13 and 14): the sequence's ratio, with a separate gradient for each token.

    s_t = sg(s) * exp(learner_logprobs - sg(learner_logprobs)),   s as in gspo, sg: without gradient

    Equals gspo in value. Its gradient equals gspo's if all tokens of the sequence have the same advantage.
    """

    name: Literal["gspo_token"] = "gspo_token"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
    denominator: Denominator = "sequences"

    def ratio(self, inputs: LossInputs) -> Tensor:
        own = (inputs.learner_logprobs - inputs.learner_logprobs.detach()).exp()
        return sequence_ratios(inputs).detach() * own


class CispoLoss(LossSettings):
    """CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5): clips a token's weight, and keeps every token's gradient.

    L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * learner_logprobs
    r = exp(learner_logprobs - proximal_logprobs)

    The paper has no lower bound (clip_low = 1), and gives no number for the upper bound. TRL's 5 is clip_high = 4.
    """

    name: Literal["cispo"] = "cispo"
    clip_low: ClipLow = 1.0
    clip_high: ClipHigh = 4.0

    def term(self, inputs: LossInputs) -> LossOutput:
        ratio = token_ratios(inputs).detach()
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        policy = -clipped * inputs.advantages * inputs.learner_logprobs
        return LossOutput(policy, ratio_metrics(ratio, clipped != ratio))


class SapoArgs(Section):
    temperature_positive: PositiveFloat = Field(1.0, description="Temperature of the gate for a positive advantage.")
    temperature_negative: PositiveFloat = Field(1.05, description="Temperature of the gate for a negative advantage.")


class SapoLoss(LossSettings):
    """SAPO (arXiv:2511.20347, eq. 5 and 6): a soft gate instead of the clip.

    L = -f(r) * A,   f(r) = 4 / tau * sigmoid(tau * (r - 1)),   r = exp(learner_logprobs - proximal_logprobs)
    tau = temperature_positive where A > 0, else temperature_negative

    At r = 1 the gradient equals that of r * A. The gradient decreases on both sides of 1, and no token is clipped.
    """

    name: Literal["sapo"] = "sapo"
    args: SapoArgs = SapoArgs()
    denominator: Denominator = "sequences"

    def term(self, inputs: LossInputs) -> LossOutput:
        ratio = token_ratios(inputs)
        positive = ratio.new_full((), self.args.temperature_positive)
        tau = positive.where(inputs.advantages > 0, self.args.temperature_negative)
        gate = 4.0 / tau * (tau * (ratio - 1.0)).sigmoid()
        return LossOutput(-gate * inputs.advantages, ratio_metrics(ratio, ratio < 0.0))


def _means(minibatch: LossInputs) -> tuple[Tensor, Tensor]:
    return minibatch.proximal_logprobs.mean(), minibatch.advantages.mean()


def _covariances(inputs: LossInputs, mean_logprob: Tensor, mean_advantage: Tensor) -> Tensor:
    """Return (log p - mean log p) * (A - mean A) of each token `[C]`; p is the proximal policy's probability."""
    return (inputs.proximal_logprobs - mean_logprob) * (inputs.advantages - mean_advantage)


class KlCovArgs(Section):
    fraction: float = Field(2e-4, gt=0.0, le=1.0, description="Share of the tokens that get the KL penalty.")
    kl_coef: NonNegativeFloat = Field(1.0, description="Weight of this KL penalty, to the proximal policy.")


class KlCovLoss(LossSettings):
    """KL-Cov (arXiv:2505.22617, eq. 14): adds a KL penalty to the tokens that lower the entropy most.

    L = -r * A                                                            r = exp(learner_logprobs - proximal_logprobs)
    L = -r * A + kl_coef * KL(proximal || learner)                        for the penalised tokens

    Penalises the share `fraction` of the optimizer step's tokens with the largest covariance of logprob and advantage.
    The KL is estimated by k3, unbiased at tokens that the proximal policy sampled. The authors' code uses |log r|.
    There is no clip: `policy/clip_fraction` counts the penalised tokens.
    """

    name: Literal["kl_cov"] = "kl_cov"
    args: KlCovArgs = KlCovArgs()
    scales_advantage: ClassVar[bool] = False
    compares_minibatch: ClassVar[bool] = True

    def prepare(self, minibatch: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean logprob, the mean advantage and the smallest covariance of a penalised token."""
        covariances = _covariances(minibatch, *(means := _means(minibatch)))
        return (*means, covariances.topk(math.ceil(self.args.fraction * len(covariances))).values.min())

    def term(self, inputs: LossInputs) -> LossOutput:
        *means, bound = inputs.of_minibatch[self.name]
        ratio, is_held = token_ratios(inputs), _covariances(inputs, *means) >= bound
        penalty = self.args.kl_coef * kl_k3(inputs.proximal_logprobs, inputs.learner_logprobs) * is_held
        return LossOutput(penalty - ratio * inputs.advantages, ratio_metrics(ratio, is_held))


class ClipCovArgs(ClippedArgs):
    fraction: float = Field(2e-4, gt=0.0, le=1.0, description="Share of the tokens to drop from the loss.")
    low: float = Field(1.0, description="Only tokens with a larger covariance are dropped.")
    high: float = Field(5.0, description="Only tokens with a smaller covariance are dropped.")

    @model_validator(mode="after")
    def _has_room(self) -> ClipCovArgs:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} must be less than high = {self.high:g}: nothing lies between them")
        return self


class ClipCovLoss(_Clipped):
    """Clip-Cov (arXiv:2505.22617, eq. 11 and 12): drops a few random tokens of those that lower the entropy.

    L = -min(r * A, clip(r) * A)        r = exp(learner_logprobs - proximal_logprobs)
    L = 0                               for the dropped tokens

    Drops the share `fraction` of the optimizer step's tokens, at least one, at random among the candidates. These are
    tokens whose covariance of logprob and advantage is between `low` and `high`. Drops all candidates if there are
    fewer. A token's draw depends on the token alone (`LossInputs.draws`), the number of dropped tokens and the means on
    the optimizer step. Ranks, packing and microbatches change nothing. The authors' code uses the learner's logprobs:
    they equal the proximal logprobs in a step's first minibatch. It does not draw tokens that the clip already dropped.
    """

    name: Literal["clip_cov"] = "clip_cov"
    args: ClipCovArgs = ClipCovArgs()
    scales_advantage: ClassVar[bool] = False
    compares_minibatch: ClassVar[bool] = True

    def prepare(self, minibatch: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean logprob, the mean advantage and the largest draw of a dropped token."""
        draws = self._draws_between(minibatch, *(means := _means(minibatch)))
        num_left_out = max(int(self.args.fraction * len(draws)), 1)
        return (*means, draws.topk(num_left_out, largest=False).values.max())

    def term(self, inputs: LossInputs) -> LossOutput:
        *means, bound = inputs.of_minibatch[self.name]
        surrogate, draws = super().term(inputs), self._draws_between(inputs, *means)
        is_left_out = (draws <= bound) & (draws < _NEVER)
        metrics = surrogate.means | {"policy/left_out_fraction": is_left_out.to(draws.dtype)}
        return LossOutput(surrogate.per_token * ~is_left_out, metrics)

    def _draws_between(self, inputs: LossInputs, mean_logprob: Tensor, mean_advantage: Tensor) -> Tensor:
        """Return the draws `[C]` of the tokens whose covariance lies between the bounds, _NEVER for the others.

        Raises ValueError without draws.
        """
        if inputs.draws is None:
            raise ValueError("clip_cov draws tokens at random: LossInputs.draws is missing")
        covariance = _covariances(inputs, mean_logprob, mean_advantage)
        return inputs.draws.where((covariance > self.args.low) & (covariance < self.args.high), _NEVER)


_NEVER = 1.0
"""Draw of a token that is not a candidate: larger than every real draw."""


class OwnLoss(LossSettings):
    """A user's function. It may have a gradient at advantage 0, so `scales_advantage` is False."""

    name: PathText = Field(description="Your function: loss(inputs, **args) returns a LossOutput.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")
    scales_advantage: ClassVar[bool] = False

    def check(self) -> None:
        LOSSES.with_args(self.name, self.args, 1)

    def term(self, inputs: LossInputs) -> LossOutput:
        found: LossOutput = LOSSES.with_args(self.name, self.args, 1)(inputs)
        return found


Loss = Annotated[
    GrpoLoss
    | BnpoLoss
    | DapoLoss
    | DrGrpoLoss
    | DecoupledPpoLoss
    | GspoLoss
    | GspoTokenLoss
    | CispoLoss
    | SapoLoss
    | KlCovLoss
    | ClipCovLoss
    | OwnLoss,
    ByName("grpo"),
]
