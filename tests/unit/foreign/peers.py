"""The losses of other systems as functions of floats, written from their formulas: one optimizer step, one loss.

A step is a list of groups, a group a list of completions. Sources: trl 1.16.0 (trl/trainer/grpo_trainer.py), verl 0.9.1
(verl/trainer/ppo/core_algos.py), areal 1.0.4 (areal/utils/functional/functional.py), open-instruct at e6c3044
(open_instruct/grpo_utils.py, data_loader.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev
from typing import Any


@dataclass(frozen=True)
class Completion:
    """Logprobs of its tokens: of the policy that learns, of the policy before the step, of engine and reference."""

    reward: float
    learner: Sequence[float]
    old: Sequence[float]
    engine: Sequence[float]
    ref: Sequence[float]

    @property
    def length(self) -> int:
        return len(self.learner)

    def ratios(self, of: str = "old") -> list[float]:
        return [math.exp(new - old) for new, old in zip(self.learner, getattr(self, of), strict=True)]

    def ratio(self, weights: Sequence[float] | None = None) -> float:
        """The one ratio of the sequence: the geometric mean, over the tokens that have a weight."""
        kept = [1.0] * self.length if weights is None else weights
        logs = [new - old for new, old, own in zip(self.learner, self.old, kept, strict=True) if own]
        return math.exp(fmean(logs)) if logs else 1.0

    def mismatches(self) -> list[float]:
        return [math.exp(old - engine) for old, engine in zip(self.old, self.engine, strict=True)]


Step = Sequence[Sequence[Completion]]


def k1(new: float, ref: float) -> float:
    return new - ref


def k3(new: float, ref: float) -> float:
    return math.exp(ref - new) - (ref - new) - 1.0


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def gate(ratio: float, advantage: float, positive: float, negative: float) -> float:
    tau = positive if advantage > 0 else negative
    return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage


def by_tokens(losses: Sequence[Sequence[float]]) -> float:
    return sum(map(sum, losses)) / sum(map(len, losses))


def by_sequences(losses: Sequence[Sequence[float]]) -> float:
    return fmean(map(fmean, losses))


def by_constant(longest: int) -> Callable[[Sequence[Sequence[float]]], float]:
    return lambda losses: sum(map(sum, losses)) / (len(losses) * longest)


def trl(step: Step, **s: Any) -> float:
    """Settings by TRL's names, with its defaults. With vLLM; `max_completion_length` divides dr_grpo."""
    s = {"loss_type": "dapo", "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": None, "delta": None,
         "beta": 0.0, "use_bias_correction_kl": True, "scale_rewards": "group", "mode": "sequence_mask", "min": None,
         "max": 3.0, "max_completion_length": 512, "sapo": (1.0, 1.05)} | s  # fmt: skip
    low, high = s["epsilon"], s["epsilon"] if s["epsilon_high"] is None else s["epsilon_high"]
    everyone = stdev(each.reward for group in step for each in group)
    losses = []
    for group in step:
        mean, deviation = fmean(each.reward for each in group), stdev(each.reward for each in group)
        scale = {"group": deviation + 1e-4, "batch": everyone + 1e-4, False: 1.0}[s["scale_rewards"]]
        for each in group:
            advantage = (each.reward - mean) / scale
            weights = each.mismatches()
            if s["mode"].startswith("sequence"):
                weights = [math.prod(weights)] * each.length
            low_bound = -math.inf if s["min"] is None else s["min"]
            if s["mode"].endswith("mask"):
                weights = [w if low_bound <= w <= s["max"] else 0.0 for w in weights]
            else:
                weights = [clip(w, low_bound, s["max"]) for w in weights]
            ratios = [each.ratio()] * each.length if s["importance_sampling_level"] == "sequence" else each.ratios()
            own = []
            for t, (ratio, weight) in enumerate(zip(ratios, weights, strict=True)):
                if s["loss_type"] == "cispo":
                    policy = -min(ratio, high) * advantage * each.learner[t]
                elif s["loss_type"] == "sapo":
                    policy = gate(ratio, advantage, *s["sapo"])
                else:
                    bounded = ratio if s["delta"] is None else min(ratio, s["delta"])
                    policy = -min(bounded * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
                kl = k3(each.learner[t], each.ref[t]) * (ratio if s["use_bias_correction_kl"] else 1.0)
                own.append(policy * weight + s["beta"] * kl)
            losses.append(own)
    constant = by_constant(s["max_completion_length"])
    reduced = {"dapo": by_tokens, "cispo": by_tokens, "dr_grpo": constant, "luspo": by_constant(1)}
    return reduced.get(s["loss_type"], by_sequences)(losses)


def verl_advantages(step: Step, estimator: str) -> list[list[float]]:
    found = []
    for group in step:
        rewards = [each.reward for each in group]
        mean, size = fmean(rewards), len(rewards)
        if estimator == "grpo":
            found.append([(r - mean) / (stdev(rewards) + 1e-6) for r in rewards])
        else:
            found.append([(r - mean) * size / (size - 1) for r in rewards])
    return found


def verl(step: Step, **s: Any) -> float:
    s = {"loss_mode": "vanilla", "low": 0.2, "high": 0.2, "c": 3.0, "agg": "token-mean", "kl": 0.0, "taus": (1.0, 1.05),
         "estimator": "grpo", "level": None, "threshold": 2.0, "lower": None} | s  # fmt: skip
    losses = []
    for group, advantages in zip(step, verl_advantages(step, s["estimator"]), strict=True):
        for each, advantage in zip(group, advantages, strict=True):
            ratios = [each.ratio()] * each.length if s["loss_mode"] == "gspo" else each.ratios()
            weights = {None: [1.0] * each.length, "token": each.mismatches(),
                       "sequence": [math.prod(each.mismatches())] * each.length}[s["level"]]  # fmt: skip
            if s["lower"] is None:
                weights = [min(w, s["threshold"]) for w in weights]
            else:
                weights = [w if s["lower"] <= w <= s["threshold"] else 0.0 for w in weights]
            own = []
            for t, (ratio, weight) in enumerate(zip(ratios, weights, strict=True)):
                if s["loss_mode"] == "cispo":
                    policy = -clip(ratio, 1 - s["low"], 1 + s["high"]) * advantage * each.learner[t]
                elif s["loss_mode"] == "sapo":
                    policy = gate(ratio, advantage, *s["taus"])
                else:
                    policy = surrogate(ratio, advantage, s["low"], s["high"])
                    if s["loss_mode"] == "vanilla" and advantage < 0:
                        policy = min(policy, -s["c"] * advantage)
                own.append(policy * weight + s["kl"] * k3(each.learner[t], each.ref[t]))
            losses.append(own)
    return by_sequences(losses) if s["agg"] == "seq-mean-token-mean" else by_tokens(losses)


def areal_advantages(step: Step, scale: float, bias: float, *, eps: float = 1e-5) -> list[list[float]]:
    """The rewards, normalised within their groups; the norm over all tokens comes after it."""
    found = []
    for group in step:
        rewards = [(each.reward + bias) * scale for each in group]
        found.append([(r - fmean(rewards)) / (stdev(rewards) + eps) for r in rewards])
    return found


def over_tokens(step: Step, advantages: Sequence[Sequence[float]], eps: float = 1e-5) -> list[list[float]]:
    """AReaL's adv_norm by batch: of the tokens, each with the advantage of its completion."""
    of_tokens = [a for group, own in zip(step, advantages, strict=True)
                 for each, a in zip(group, own, strict=True) for _ in each.learner]  # fmt: skip
    mean, deviation = fmean(of_tokens), stdev(of_tokens)
    return [[(a - mean) / (deviation + eps) for a in own] for own in advantages]


def areal(step: Step, advantages: Sequence[Sequence[float]], **s: Any) -> float:
    s = {"eps_clip": 0.2, "level": "token", "decoupled": True, "recompute": True, "upper": 5.0, "sapo": None} | s
    losses = []
    for group, of_group in zip(step, advantages, strict=True):
        for each, advantage in zip(group, of_group, strict=True):
            anchor = "old" if s["decoupled"] or s["recompute"] else "engine"
            weights = [w if w <= s["upper"] else 0.0 for w in each.mismatches()] if s["decoupled"] and s["upper"] else [
                1.0] * each.length  # fmt: skip
            ratios = [each.ratio(weights)] * each.length if s["level"] == "sequence" else each.ratios(anchor)
            losses.append([
                gate(ratio, advantage, *s["sapo"]) if s["sapo"]
                else weight * surrogate(ratio, advantage, s["eps_clip"], s["eps_clip"])
                for ratio, weight in zip(ratios, weights, strict=True)
            ])  # fmt: skip
    return by_tokens(losses)


def open_instruct(step: Step, **s: Any) -> float:
    s = {
        "low": 0.2,
        "high": 0.272,
        "loss_fn": "dapo",
        "advantage": "centered",
        "beta": 0.05,
        "cap": 2.0,
        "mask": None,
    } | s
    losses = []
    for group in step:
        rewards = [each.reward for each in group]
        scale = pstdev(rewards) + 1e-8 if s["advantage"] == "standard" else 1.0
        for each in group:
            advantage = (each.reward - fmean(rewards)) / scale
            own = []
            for t, (ratio, rho) in enumerate(zip(each.ratios(), each.mismatches(), strict=True)):
                if s["loss_fn"] == "cispo":
                    policy = -advantage * min(ratio, 1 + s["high"]) * each.learner[t]
                else:
                    policy = surrogate(ratio, advantage, s["low"], s["high"])
                weight = min(rho, s["cap"]) if s["mask"] is None else rho * (s["mask"][0] <= rho <= s["mask"][1])
                own.append(policy * weight + s["beta"] * k3(each.learner[t], each.ref[t]))
            losses.append(own)
    return by_tokens(losses)
