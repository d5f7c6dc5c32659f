"""The choices of `loss.correction`, which correct the mismatch between engine and learner: a settings class each.

A correction's weights multiply the policy term of every loss, but not KL and entropy terms: these are penalties on the
learner, whichever policy sampled the token. A masked token still counts in `loss.denominator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from hpc_grpo.algorithms.terms import MAX_LOG_RATIO, LossInputs, sequence_mean, sequence_sum
from hpc_grpo.registry import CORRECTIONS
from hpc_grpo.section import ByName, PathText, Section

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """`weights` `[C]` multiply the policy term; 0.0 masks a token.

    `bounded` `[C]` is boolean: True if a bound changed the weight. Neither tensor has a gradient.
    """

    weights: Tensor
    bounded: Tensor


def mismatch(inputs: LossInputs) -> Tensor:
    """Return log(proximal / engine) of each token `[C]`: the proximal logprob minus the engine's, without gradient."""
    return (inputs.proximal_logprobs - inputs.engine_logprobs).detach()


def _capped(log_weights: Tensor, cap: float) -> Weights:
    # Cap the exponent, not the result: the exponential of a huge difference would overflow.
    log_cap = math.log(cap)
    return Weights(log_weights.clamp(max=log_cap).exp(), log_weights > log_cap)


def _masked(log_weights: Tensor, is_kept: Tensor) -> Weights:
    # Mask before the exponential: a value outside the bounds may overflow.
    weights = log_weights.where(is_kept, log_weights.new_zeros(())).exp()
    return Weights(weights * is_kept, ~is_kept)


class CorrectionSettings(Section):
    name: str
    compares_minibatch: ClassVar[bool] = False
    """Whether `prepare` is called, with all tokens of an optimizer step, before `weigh`."""

    def check(self) -> None:
        """Raise ConfigError if the user's function does not exist or does not take its args."""

    def weigh(self, inputs: LossInputs) -> Weights:
        raise NotImplementedError

    def prepare(self, minibatch: LossInputs) -> Any:
        """Return the value that `weigh` reads from `inputs.of_minibatch` under the correction's name."""
        raise NotImplementedError


class NoCorrection(CorrectionSettings):
    name: Literal["none"] = "none"

    def weigh(self, inputs: LossInputs) -> Weights:
        """Return w = 1."""
        weights = mismatch(inputs).new_ones(len(inputs.sequence_ids))
        return Weights(weights, weights < 0.0)


class CapArgs(Section):
    cap: PositiveFloat = Field(2.0, description="Largest weight of a token, or of a sequence.")


class Truncated(CorrectionSettings):
    name: Literal["truncated"] = "truncated"
    args: CapArgs = CapArgs()

    def weigh(self, inputs: LossInputs) -> Weights:
        """Return w = min(proximal / engine, cap) of each token.

        This is truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly
        brings you off-policy RL training") from the engine's policy to the proximal policy, as in decoupled PPO (Hilton
        et al., arXiv:2110.00641; AReaL, arXiv:2505.24298). The clipped ratio of the loss then compares with the
        proximal policy.
        """
        return _capped(mismatch(inputs), self.args.cap)


class SequenceCorrection(CorrectionSettings):
    name: Literal["sequence"] = "sequence"
    args: CapArgs = CapArgs()

    def weigh(self, inputs: LossInputs) -> Weights:
        """Return w = min(product over the sequence's tokens of proximal / engine, cap) for each of its tokens.

        This is the truncated importance weight of a sequence (Liu et al. 2025, "When Speed Kills Stability"). A product
        grows or shrinks exponentially with length: even a small mismatch gives a long sequence a tiny weight, or the
        cap.
        """
        return _capped(sequence_sum(mismatch(inputs), inputs.sequence_ids), self.args.cap)


_Low = Annotated[NonNegativeFloat, Field(description="Smallest weight that is not masked.")]
_Cap = Annotated[PositiveFloat, Field(description="Largest weight that is not masked.")]


class _Bounds(Section):
    low: _Low
    cap: _Cap

    @model_validator(mode="after")
    def _has_room(self) -> _Bounds:
        if self.low >= self.cap:
            raise ValueError(f"low = {self.low:g} must be less than cap = {self.cap:g}")
        return self


class GeometricArgs(_Bounds):
    low: _Low = 0.999
    cap: _Cap = 1.002


class IcePopArgs(_Bounds):
    low: _Low = 0.5
    cap: _Cap = 5.0


class SequenceMaskArgs(_Bounds):
    low: _Low = 0.0
    cap: _Cap = 3.0


class M2poArgs(Section):
    cap: PositiveFloat = Field(0.04, description="Largest mean of (log weight)^2 over the tokens that are not masked.")


class _Bounded(CorrectionSettings):
    args: _Bounds

    def _within(self, log_weights: Tensor, log_ratio: Tensor) -> Weights:
        """Weigh by exp(log_weights) if low <= exp(log_ratio) <= cap, else 0."""
        ratio = log_ratio.double().exp()
        return _masked(log_weights, (ratio >= self.args.low) & (ratio <= self.args.cap))


class Geometric(_Bounded):
    name: Literal["geometric"] = "geometric"
    args: GeometricArgs = GeometricArgs()

    def weigh(self, inputs: LossInputs) -> Weights:
        """Return w = proximal / engine of each token if low <= g <= cap for its sequence, else 0.

        g = exp(mean over the sequence's tokens of log(proximal / engine)), which does not depend on the length
        (Liu et al. 2025, "When Speed Kills Stability"; the bounds are those of NeMo-RL's seq-mask-tis).
        """
        log_weights = mismatch(inputs)
        return self._within(log_weights.clamp(max=MAX_LOG_RATIO), sequence_mean(log_weights, inputs.sequence_ids))


class IcePop(_Bounded):
    name: Literal["icepop"] = "icepop"
    args: IcePopArgs = IcePopArgs()

    def weigh(self, inputs: LossInputs) -> Weights:
        """Return w = proximal / engine of each token if low <= w <= cap, else 0.

        Ring-Team 2025, "Small leak can sink a great ship", and Ling Team, arXiv:2510.18855. With low = 0 this is
        AReaL's cap on behaviour weights (arXiv:2505.24298), which masks too.
        """
        log_weights = mismatch(inputs)
        return self._within(log_weights, log_weights)


class SequenceMask(_Bounded):
    name: Literal["sequence_mask"] = "sequence_mask"
    args: SequenceMaskArgs = SequenceMaskArgs()

    def weigh(self, inputs: LossInputs) -> Weights:
        """Return w = product over the sequence's tokens of proximal / engine for each token if low <= w <= cap, else 0.

        This is TRL's default with vLLM (`sequence_mask`, trl/trainer/grpo_trainer.py, with its cap), and verl's IcePop
        by sequence (verl/trainer/ppo/rollout_corr_helper.py). It masks a sequence where `sequence` truncates the
        weight.
        """
        log_weights = sequence_sum(mismatch(inputs), inputs.sequence_ids)
        return self._within(log_weights, log_weights)


class M2po(CorrectionSettings):
    name: Literal["m2po"] = "m2po"
    args: M2poArgs = M2poArgs()
    compares_minibatch: ClassVar[bool] = True

    def prepare(self, minibatch: LossInputs) -> Tensor:
        """Return the largest (log r)^2 to keep among all tokens of an optimizer step; -1.0 if every token is masked."""
        squares = mismatch(minibatch).square().sort().values
        means = squares.cumsum(0) / squares.new_ones(len(squares)).cumsum(0)
        # Running means of sorted squares grow, so the means within the bound come first.
        num_kept = (means <= self.args.cap).sum()
        return squares.gather(0, (num_kept - 1).clamp(min=0).unsqueeze(0)).squeeze(0).where(num_kept > 0, -1.0)

    def weigh(self, inputs: LossInputs) -> Weights:
        """Return w = r = proximal / engine of each kept token, and 0 of each masked token.

        Masks the tokens with the largest (log r)^2, as few as needed: the mean over the kept tokens of the optimizer
        step, on all ranks, must be at most `cap` (M2PO, arXiv:2510.01161, algorithm 1). The paper's loss has no clip;
        here the clip of `loss` around the proximal policy stays.
        """
        log_weights = mismatch(inputs)
        return _masked(log_weights.clamp(max=MAX_LOG_RATIO), log_weights.square() <= inputs.of_minibatch[self.name])


class OwnCorrection(CorrectionSettings):
    name: PathText = Field(description="Your function: correction(inputs, **args) returns Weights.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")

    def check(self) -> None:
        CORRECTIONS.with_args(self.name, self.args, 1)

    def weigh(self, inputs: LossInputs) -> Weights:
        found: Weights = CORRECTIONS.with_args(self.name, self.args, 1)(inputs)
        return found


Correction = Annotated[
    NoCorrection | Truncated | SequenceCorrection | SequenceMask | Geometric | IcePop | M2po | OwnCorrection,
    ByName("truncated"),
    Field(description="Corrects for the mismatch of engine and learner logprobs."),
]
