"""Metrics of an eval: pass@k, rewards and lengths with confidence intervals, of the whole set and by source.

Pure functions of what was graded. A metric of your own is a function from `EvalGroup`s to numbers (`eval.metrics`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import NormalDist, fmean, pvariance, variance
from typing import Any

from hpc_grpo.config import EvalConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.system.readable import number_or_none

LOW, HIGH = "_low", "_high"
"""After a metric's name: the bounds of its interval."""

_CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)


@dataclass(frozen=True)
class EvalGroup:
    """An eval prompt with its graded completions; tuples have length n, `eval.num_samples`.

    `fields` are the columns of the data set, the reference among them as `answer`. Where the reward failed,
    `is_graded` is False and `rewards` and `solved` say nothing.
    """

    prompt: str
    source: str
    fields: Mapping[str, Any]
    completions: tuple[str, ...]
    rewards: tuple[float, ...]
    solved: tuple[bool, ...]
    num_tokens: tuple[int, ...]
    is_graded: bool = True


EvalMetric = Callable[[Sequence[EvalGroup]], Mapping[str, float]]
"""Makes numbers, by their names, of prompts whose reward did not fail: all of a set, and those of each source."""


def eval_metrics(
    groups: Sequence[EvalGroup], settings: EvalConfig, own: Mapping[str, EvalMetric] | None = None
) -> dict[str, float]:
    """Measure a set as `pass@k`, `reward_mean`, `tokens_mean`, `failed_fraction`, and what the user's `own` make of it.

    The first three have 95% intervals, `NAME_low` to `NAME_high`. pass@k and rewards leave out the prompts whose reward
    failed, and are absent where none is left; `failed_fraction` is their share. Of a set with several sources each
    metric comes once more for each, as `NAME/SOURCE`. Raises ConfigError where one of the user's breaks its contract.
    """
    metrics = _measured(groups, settings, own or {})
    sources = sorted({group.source for group in groups})
    for source in sources if len(sources) > 1 else ():
        of_source = _measured([group for group in groups if group.source == source], settings, own or {})
        metrics |= {f"{name}/{source}": value for name, value in of_source.items()}
    return metrics


def paired_differences(
    before: Sequence[EvalGroup], after: Sequence[EvalGroup], settings: EvalConfig
) -> dict[str, float]:
    """Measure how far two models are apart on the same prompts, `after` minus `before`, with 95% intervals.

    The metrics are those of `eval_metrics` that have intervals, by its names; where the reward of either failed, a
    prompt counts for neither. Empty where the prompts are not the same.
    """
    # As text: NaN, as columns have it for nothing, is not equal to itself.
    if [repr(group.fields) for group in before] != [repr(group.fields) for group in after]:
        return {}
    pairs = list(zip(before, after, strict=True))
    sources = sorted({group.source for group in before})
    metrics = _differences(pairs, settings)
    for source in sources if len(sources) > 1 else ():
        of_source = _differences([pair for pair in pairs if pair[0].source == source], settings)
        metrics |= {f"{name}/{source}": value for name, value in of_source.items()}
    return metrics


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Estimate, without bias, the chance that at least one of `k` completions solves the prompt.

    `1 - C(n - c, k) / C(n, k)` for n samples of which c are solved: the share of all k-subsets that hold a
    solved one. Chen et al. 2021, Evaluating Large Language Models Trained on Code (arXiv:2107.03374), eq. 1.
    Unlike `1 - (1 - c/n)^k` it is not biased low. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.

    >>> pass_at_k(num_samples=4, num_solved=1, k=2)
    0.5
    """
    if not 0 <= num_solved <= num_samples:
        raise ValueError(f"num_solved = {num_solved} must be between 0 and num_samples = {num_samples}.")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} must be between 1 and num_samples = {num_samples}.")
    # Exact integers: the factorials of a few hundred samples do not fit a float.
    return 1.0 - comb(num_samples - num_solved, k) / comb(num_samples, k)


def share_interval(shares: Sequence[float], max_draws: int = 1) -> tuple[float, float]:
    """Return the 95% interval of the mean of prompts' own shares, each in [0, 1], over prompts of their kind.

    Wilson's score interval (1927, J. Am. Stat. Assoc. 22) with an effective number of draws in the place of n:

        (p + z^2 / 2n -+ z * sqrt(p * (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),   n = p * (1 - p) / (V / N)

    p is the mean and V the variance of the N shares: completions of one prompt are alike, and count as few draws where
    they are (Franco et al. 2019, doi:10.1093/jssam/smy019, sec. 2). n is at most N * `max_draws`, the independent draws
    behind a share, and N where all shares are 0 or all 1. Of one draw a prompt it is Wilson's own. It stays in [0, 1],
    and means something for the few prompts and the shares near 0 and 1 at which p -+ z * standard error and the
    bootstrap promise too much (Bowyer et al. 2025, arXiv:2503.01747).

    >>> low, high = share_interval([0.0] * 20)
    >>> round(low, 3), round(high, 3)
    (0.0, 0.161)
    """
    p, num_prompts = fmean(shares), len(shares)
    spread = pvariance(shares, p)
    n = float(num_prompts * max_draws)
    if not 0.0 < p < 1.0:
        n = float(num_prompts)
    elif spread:
        n = min(n, num_prompts * p * (1 - p) / spread)
    middle, half = p + _Z**2 / (2 * n), _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
    scale = 1 + _Z**2 / n
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean of prompts' own means, m -+ z * s / sqrt(N); needs two prompts.

    By the central limit theorem, with prompts as the unit that is drawn: completions of one prompt are a cluster
    (Miller 2024, arXiv:2411.00640, sec. 2).
    """
    half = _Z * math.sqrt(variance(values) / len(values))
    return fmean(values) - half, fmean(values) + half


def difference_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean of paired differences of shares, each in [-1, 1].

    The adjusted Wald interval of matched proportions (Agresti and Min 2005, Statistics in Medicine 24, 729-740):

        d' -+ z * sqrt((S + 1) / (N + 2) - d'^2) / sqrt(N + 2),   d' = sum(d) / (N + 2)

    S is the sum of the squares: half an observation more for each pair of outcomes, of which two differ. It means
    something for few prompts, and where no prompt or every one tells the two models apart; the bootstrap's is a point
    then, and promises too much. Of several completions a prompt, d is the difference of its shares. Where one prompt in
    a hundred differs, and always one way, it holds the truth in 86 of 100 cases of 200 prompts: a little short.

    >>> low, high = difference_interval([0.0] * 20)
    >>> round(low, 3), round(high, 3)
    (-0.089, 0.089)
    """
    n = len(differences) + 2
    middle = sum(differences) / n
    spread = (sum(d * d for d in differences) + 1) / n - middle**2
    half = _Z * math.sqrt(spread / n)
    return max(-1.0, middle - half), min(1.0, middle + half)


def _differences(pairs: Sequence[tuple[EvalGroup, EvalGroup]], settings: EvalConfig) -> dict[str, float]:
    graded = [pair for pair in pairs if all(group.is_graded for group in pair)]
    metrics: dict[str, float] = {}
    for k in sorted({1, *settings.pass_k}) if graded else ():
        shares = [[pass_at_k(settings.num_samples, sum(group.solved), k) for group in pair] for pair in graded]
        values = [after - before for before, after in shares]
        metrics |= _with_bounds(f"pass@{k}", values, difference_interval(values))
    if graded:
        metrics |= _of_means("reward_mean", [fmean(after.rewards) - fmean(before.rewards) for before, after in graded])
    return metrics | _of_means(
        "tokens_mean", [fmean(after.num_tokens) - fmean(before.num_tokens) for before, after in pairs]
    )


def _measured(groups: Sequence[EvalGroup], settings: EvalConfig, own: Mapping[str, EvalMetric]) -> dict[str, float]:
    graded = [group for group in groups if group.is_graded]
    metrics: dict[str, float] = {}
    for k in sorted({1, *settings.pass_k}) if graded else ():
        shares = [pass_at_k(settings.num_samples, sum(group.solved), k) for group in graded]
        metrics |= _with_bounds(f"pass@{k}", shares, share_interval(shares, settings.num_samples // k))
    if graded:
        metrics |= _of_means("reward_mean", [fmean(group.rewards) for group in graded])
    metrics["failed_fraction"] = 1.0 - len(graded) / len(groups)
    metrics |= _of_means("tokens_mean", [fmean(group.num_tokens) for group in groups])
    for name, function in own.items() if graded else ():
        metrics |= _checked(name, function(graded), taken=metrics)
    return metrics


def _of_means(name: str, values: Sequence[float]) -> dict[str, float]:
    return _with_bounds(name, values, mean_interval(values)) if len(values) > 1 else {name: values[0]}


def _with_bounds(name: str, values: Sequence[float], bounds: tuple[float, float]) -> dict[str, float]:
    return {name: fmean(values), f"{name}{LOW}": bounds[0], f"{name}{HIGH}": bounds[1]}


def _checked(name: str, values: Any, taken: Mapping[str, float]) -> dict[str, float]:
    rule = f"eval.metrics: {name} must return a dict of finite numbers by names of their own"
    if not isinstance(values, Mapping):
        raise ConfigError(f"{rule}, not {values!r}.")
    for key, value in values.items():
        number = number_or_none(value)
        if not isinstance(key, str) or key in taken or number is None or not math.isfinite(number):
            raise ConfigError(f"{rule}; {key!r} is {'taken' if key in taken else repr(value)}.")
    return {key: float(value) for key, value in values.items()}
