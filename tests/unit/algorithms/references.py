"""Losses, corrections and KL terms once more, from their papers' equations: float64, one sequence at a time, by loops.

`live` logprobs are those that a gradient flows through; `still` are the same numbers under a stop-gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Array = Any
Settings = Any
"""A class of `Loss`: which keys it has, its name says."""


@dataclass(frozen=True)
class Trained:
    """The trained tokens of one sequence; all arrays `[n]`, float64. `of_step` is what `with_step` makes of all."""

    learner: Array
    proximal: Array
    engine: Array
    reference: Array
    advantages: Array
    draws: Array
    of_step: tuple[float, ...] = ()


def with_step(sequences: Sequence[Trained], settings: Settings) -> list[Trained]:
    """Tell each sequence what a variant wants to know of all tokens of the step."""
    found: tuple[float, ...] = ()
    if settings.correction.name == "m2po":
        found = (second_moment_limit(sequences, settings.correction.args.cap),)
    if settings.name == "kl_cov":
        found = covariance_limit(sequences, settings.args.fraction)
    if settings.name == "clip_cov":
        found = largest_draw(sequences, settings)
    return [replace(own, of_step=found) for own in sequences]


def second_moment_limit(sequences: Sequence[Trained], threshold: float) -> float:
    """M2PO, arXiv:2510.01161, algorithm 1: mask the largest second moment until the mean of the rest is small."""
    moments = sorted(
        (before - sampled) ** 2 for own in sequences for before, sampled in zip(own.proximal, own.engine, strict=True)
    )
    while moments and math.fsum(moments) / len(moments) > threshold:
        moments.pop()
    return moments[-1] if moments else -1.0


def covariance_limit(sequences: Sequence[Trained], share: float) -> tuple[float, float, float]:
    """KL-Cov, arXiv:2505.22617, eq. 10 and 13: (log p - mean)(A - mean), and the largest k of N."""
    logprobs = np.concatenate([own.proximal for own in sequences])
    advantages = np.concatenate([own.advantages for own in sequences])
    covariances = sorted((logprobs - logprobs.mean()) * (advantages - advantages.mean()), reverse=True)
    return logprobs.mean(), advantages.mean(), covariances[math.ceil(share * len(covariances)) - 1]


def is_held(own: Trained) -> Array:
    mean_logprob, mean_advantage, limit = own.of_step
    return (own.proximal - mean_logprob) * (own.advantages - mean_advantage) >= limit


def kl_cov(live: Array, still: Array, own: Trained, settings: Settings) -> Array:
    """KL-Cov, arXiv:2505.22617, eq. 14: -r A, plus beta KL(old || new) of the k tokens."""
    terms = []
    for now, before, advantage, held in zip(live, own.proximal, own.advantages, is_held(own), strict=True):
        x = math.exp(now - before)
        terms.append(-x * advantage + (settings.args.kl_coef * (x - 1.0 - math.log(x)) if held else 0.0))
    return np.array(terms)


def largest_draw(sequences: Sequence[Trained], settings: Settings) -> tuple[float, float, float]:
    """Clip-Cov, arXiv:2505.22617, eq. 11: r N tokens at random of those whose covariance lies between the bounds."""
    logprobs = np.concatenate([own.proximal for own in sequences])
    advantages = np.concatenate([own.advantages for own in sequences])
    draws = np.concatenate([own.draws for own in sequences])
    covariances = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    low, high = settings.args.low, settings.args.high
    candidates = sorted(d for d, cov in zip(draws, covariances, strict=True) if low < cov < high)
    count = min(max(int(settings.args.fraction * len(draws)), 1), len(candidates))
    return logprobs.mean(), advantages.mean(), candidates[count - 1] if count else -1.0


def is_left_out(own: Trained, settings: Settings) -> Array:
    mean_logprob, mean_advantage, largest = own.of_step
    covariances = (own.proximal - mean_logprob) * (own.advantages - mean_advantage)
    between = (settings.args.low < covariances) & (covariances < settings.args.high)
    return between & (own.draws <= largest)


def clip_cov(live: Array, still: Array, own: Trained, settings: Settings) -> Array:
    """Clip-Cov, arXiv:2505.22617, eq. 12: the surrogate, and 0 of the tokens drawn."""
    return np.where(is_left_out(own, settings), 0.0, token_level(live, still, own, settings))


def clip(ratio: float, settings: Settings) -> float:
    return min(max(ratio, 1.0 - settings.clip_low), 1.0 + settings.clip_high)


def ppo_term(ratio: float, advantage: float, settings: Settings) -> float:
    """PPO, arXiv:1707.06347, eq. 7; dual clip, arXiv:1912.09729, eq. 5: max(min(r A, clip(r) A), c A) where A < 0."""
    objective = min(ratio * advantage, clip(ratio, settings) * advantage)
    if settings.args.dual_clip is not None and advantage < 0:
        objective = max(objective, settings.args.dual_clip * advantage)
    return -objective


def token_level(live: Array, still: Array, own: Trained, settings: Settings) -> Array:
    """GRPO, arXiv:2402.03300, eq. 3, without its sums: a token's own ratio to the policy before the step."""
    ratios = [math.exp(now - before) for now, before in zip(live, own.proximal, strict=True)]
    return np.array([ppo_term(r, a, settings) for r, a in zip(ratios, own.advantages, strict=True)])


def sequence_level(live: Array, still: Array, own: Trained, settings: Settings) -> Array:
    """GSPO, arXiv:2507.18071, eq. 5 and 7: s = (pi(y) / pi_old(y)) ^ (1 / |y|)."""
    likelihood_ratio = math.exp(math.fsum(live - own.proximal))
    s = likelihood_ratio ** (1.0 / len(live))
    return np.array([ppo_term(s, a, settings) for a in own.advantages])


def sequence_level_by_token(live: Array, still: Array, own: Trained, settings: Settings) -> Array:
    """GSPO-token, arXiv:2507.18071, eq. 13 and 14: s_t = sg[s] * pi(y_t) / sg[pi(y_t)]."""
    s = math.exp(math.fsum(still - own.proximal) / len(live))
    ratios = [s * math.exp(now) / math.exp(fixed) for now, fixed in zip(live, still, strict=True)]
    return np.array([ppo_term(r, a, settings) for r, a in zip(ratios, own.advantages, strict=True)])


def cispo(live: Array, still: Array, own: Trained, settings: Settings) -> Array:
    """MiniMax-M1, arXiv:2506.13585, eq. 4 and 5: sg(clip(r)) A log pi."""
    weights = [clip(math.exp(fixed - before), settings) for fixed, before in zip(still, own.proximal, strict=True)]
    return np.array([-w * a * now for w, a, now in zip(weights, own.advantages, live, strict=True)])


def sapo(live: Array, still: Array, own: Trained, settings: Settings) -> Array:
    """SAPO, arXiv:2511.20347, eq. 5 and 6: f(r) = sigmoid(tau (r - 1)) 4 / tau."""
    terms = []
    for now, before, advantage in zip(live, own.proximal, own.advantages, strict=True):
        tau = settings.args.temperature_positive if advantage > 0 else settings.args.temperature_negative
        gate = 1.0 / (1.0 + math.exp(-tau * (math.exp(now - before) - 1.0)))
        terms.append(-4.0 / tau * gate * advantage)
    return np.array(terms)


POLICY: dict[str, Callable[[Array, Array, Trained, Settings], Array]] = {
    "grpo": token_level,
    "dr_grpo": token_level,
    "bnpo": token_level,
    "dapo": token_level,
    "decoupled_ppo": token_level,
    "gspo": sequence_level,
    "gspo_token": sequence_level_by_token,
    "cispo": cispo,
    "sapo": sapo,
    "kl_cov": kl_cov,
    "clip_cov": clip_cov,
}


def correction(own: Trained, settings: Settings) -> tuple[Array, Array]:
    """Weights, and whether a bound acted, per token: min(r, C), Yao et al. 2025; masks outside of [low, C], IcePop."""
    ratios = [math.exp(before - sampled) for before, sampled in zip(own.proximal, own.engine, strict=True)]
    low, cap = (getattr(getattr(settings.correction, "args", None), key, math.nan) for key in ("low", "cap"))
    match settings.correction.name:
        case "none":
            pairs = [(1.0, False) for _ in ratios]
        case "truncated":
            pairs = [(min(r, cap), r > cap) for r in ratios]
        case "sequence":
            pairs = [(min(math.prod(ratios), cap), math.prod(ratios) > cap) for _ in ratios]
        case "sequence_mask":
            whole = math.prod(ratios)
            pairs = [(whole, False) if low <= whole <= cap else (0.0, True) for _ in ratios]
        case "icepop":
            pairs = [(r, False) if low <= r <= cap else (0.0, True) for r in ratios]
        case "m2po":
            limit = own.of_step[0]
            gaps = own.proximal - own.engine
            pairs = [(r, False) if gap**2 <= limit else (0.0, True) for r, gap in zip(ratios, gaps, strict=True)]
        case "geometric":
            mean = math.prod(ratios) ** (1.0 / len(ratios))
            pairs = [(r, False) if low <= mean <= cap else (0.0, True) for r in ratios]
    return np.array([w for w, _ in pairs]), np.array([b for _, b in pairs])


def kl(estimator: str, live: Array, own: Trained, weights: Array) -> Array:
    """Schulman 2020: k1 = -log x, k2 = (log x)^2 / 2, k3 = x - 1 - log x, with x = q / p; DeepSeek-V3.2, eq. 7."""
    x = np.exp(own.reference - live)
    if estimator == "unbiased":
        return weights * np.exp(live - own.proximal) * (x - 1.0 - np.log(x))
    return {"k1": -np.log(x), "k2": np.log(x) ** 2 / 2.0, "k3": x - 1.0 - np.log(x)}[estimator]


def token_losses(live: Array, own: Trained, settings: Settings) -> tuple[Array, Array]:
    """The policy term and the KL term of each token; the gradient is that of `live` alone."""
    weights, _ = correction(own, settings)
    if settings.kl.coef and settings.kl.where == "reward":
        own = penalised(own, settings)
    policy = weights * POLICY[settings.name](live, own.learner, own, settings)
    if not settings.kl.coef or settings.kl.where == "reward":
        return policy, np.zeros(len(live))
    return policy, settings.kl.coef * kl(settings.kl.estimator, live, own, weights)


def penalised(own: Trained, settings: Settings) -> Trained:
    """REINFORCE++, arXiv:2501.03262, eq. 5: A_t = r - beta * sum over i = t..T of KL(i)."""
    each = kl(settings.kl.estimator, own.proximal, own, np.ones(len(own.learner)))
    rest = np.array([math.fsum(each[t:]) for t in range(len(each))])
    return replace(own, advantages=own.advantages - settings.kl.coef * rest)


def shares(sequences: Sequence[Trained], settings: Settings, longest: int) -> list[float]:
    """What a token of each sequence counts: 1/N (DAPO, eq. 8), 1/(S n) (GRPO, eq. 3), 1/(S c) (Dr. GRPO)."""
    num_tokens = sum(len(own.learner) for own in sequences)
    denominator = "constant" if isinstance(settings.denominator, int) else settings.denominator
    constant = longest if settings.denominator == "constant" else settings.denominator
    share = {
        "tokens": lambda n: 1.0 / num_tokens,
        "sequences": lambda n: 1.0 / (len(sequences) * n),
        "constant": lambda n: 1.0 / (len(sequences) * constant),
    }[denominator]
    return [share(len(own.learner)) for own in sequences]


def gradients(sequences: Sequence[Trained], settings: Settings, longest: int) -> list[Array]:
    """The loss's derivative by each live logprob, by central differences of the equations."""
    step, found = 1e-5, []
    for own, share in zip(sequences, shares(sequences, settings, longest), strict=True):
        row = []
        for t in range(len(own.learner)):
            moved = [own.learner + sign * step * (np.arange(len(own.learner)) == t) for sign in (1.0, -1.0)]
            up, down = (share * math.fsum(sum(token_losses(live, own, settings))) for live in moved)
            row.append((up - down) / (2.0 * step))
        found.append(np.array(row))
    return found


def metrics(sequences: Sequence[Trained], settings: Settings, longest: int) -> dict[str, float]:
    """Every metric that a step of these sequences has of its loss."""
    every: dict[str, list[Array]] = {}
    totals = {"loss/policy": 0.0, "loss/kl": 0.0}
    for own, share in zip(sequences, shares(sequences, settings, longest), strict=True):
        policy, penalty = token_losses(own.learner, own, settings)
        totals["loss/policy"] += share * math.fsum(policy)
        totals["loss/kl"] += share * math.fsum(penalty)
        weights, bounded = correction(own, settings)
        seen = penalised(own, settings) if settings.kl.coef and settings.kl.where == "reward" else own
        values = {
            "policy/ratio_mean": ratios_of(own, settings),
            "policy/clip_fraction": is_clipped(seen, settings),
            "correction/weight_mean": weights,
            "correction/clipped_fraction": bounded & (weights > 0.0),
            "correction/masked_fraction": weights == 0.0,
            "kl/learner_ref": kl("k3", own.learner, own, weights),
            "kl/advantage_penalty": own.advantages - seen.advantages,
        }
        if settings.name == "clip_cov":
            values["policy/left_out_fraction"] = is_left_out(own, settings)
        for name, value in values.items():
            every.setdefault(name, []).append(value)
    whole = {name: np.concatenate(values).astype(float) for name, values in every.items()}
    weights = whole["correction/weight_mean"]
    squares = math.fsum(weights**2)
    found = {name: math.fsum(values) / len(values) for name, values in whole.items()} | totals
    found["correction/ess"] = math.fsum(weights) ** 2 / (len(weights) * squares) if squares else 0.0
    if not settings.kl.coef:
        return {name: value for name, value in found.items() if name.split("/")[0] != "kl" and name != "loss/kl"}
    found.pop("kl/advantage_penalty" if settings.kl.where == "loss" else "loss/kl")
    return found


def ratios_of(own: Trained, settings: Settings) -> Array:
    log_ratios = own.learner - own.proximal
    is_whole = settings.name.startswith("gspo")
    return np.exp(np.full(len(log_ratios), log_ratios.mean()) if is_whole else log_ratios)


def is_clipped(own: Trained, settings: Settings) -> Array:
    """Where the clip takes the gradient away; CISPO's takes none, and counts where the weight is cut."""
    ratios = ratios_of(own, settings)
    if settings.name == "sapo":
        return np.zeros(len(ratios), dtype=bool)
    if settings.name == "kl_cov":
        return is_held(own)
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    if settings.name == "cispo":
        return (ratios < low) | (ratios > high)
    up, down = own.advantages > 0, own.advantages < 0
    cut = (up & (ratios > high)) | (down & (ratios < low))
    return cut | (down & (ratios > settings.args.dual_clip)) if settings.args.dual_clip else cut
