"""Fit what a decode step and a step of the learners take, as a constant and a share of what is in them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpc_grpo.config import Config
from hpc_grpo.simulate.engine import SimulatedEngine
from hpc_grpo.simulate.lengths import draw_lengths, scale_of
from hpc_grpo.simulate.measured import Measurements

_DRAWN_ROLLOUTS = 2000
_LESS = 0.8
"""The share that the second number must leave of the squared errors."""


@dataclass(frozen=True)
class Rate:
    """Give the seconds of something with n parts: `fixed_s` + `part_s` n."""

    fixed_s: float
    part_s: float

    def __call__(self, parts: float) -> float:
        return self.fixed_s + self.part_s * parts


@dataclass(frozen=True)
class DrawnStep:
    """Hold what one step of the run is worth in a simulated one: factors on the rates, and seconds as measured.

    `scale` is that of its completions' lengths.
    """

    scale: float
    sampling_factor: float
    training_factor: float
    publish_s: float
    between_s: float
    alike_share: float


@dataclass(frozen=True)
class Rates:
    """`decoding`: a decode step of n sequences in one engine. `training`: a step of n tokens in the fullest learner.

    `draws` are the run's own steps, by how much each was off.
    """

    decoding: Rate
    training: Rate
    draws: tuple[DrawnStep, ...]


def fit_rates(measured: Measurements, config: Config) -> Rates:
    """Fit both rates to a run's steps. With a lag `decoding` is but a beginning: that of the first step's wait.

    Where the steps are too alike to tell, a decode step costs the same whatever is in it (it reads the weights), and
    training costs by the token (it computes), as `plan` assumes.
    """
    engines = measured.num_nodes * config.engine.engines_per_node
    learners = measured.num_nodes * config.placement.learners_per_node
    lengths, longest = measured.sequences.lengths, config.rollout.max_new_tokens
    scales = [scale_of(lengths, step.num_tokens / step.num_rollouts, longest) for step in measured.steps]
    decode_steps = [_decode_steps(measured, config, scale, engines) for scale in scales]
    tokens = [step.num_tokens / engines for step in measured.steps]
    waits_s = [step.wait_s for step in measured.steps]
    is_alone = config.rollout.max_policy_lag == 0
    if is_alone:
        decoding = fit(decode_steps, tokens, waits_s, otherwise=_constant)
    else:
        decoding = Rate(waits_s[0] / decode_steps[0], 0.0)
    trained = [step.trained_tokens / learners for step in measured.steps]
    training = fit([1.0] * len(trained), trained, [step.train_s for step in measured.steps], otherwise=_proportional)
    draws = [
        DrawnStep(
            scale=scale,
            sampling_factor=step.wait_s / (decoding.fixed_s * count + decoding.part_s * own) if is_alone else 1.0,
            training_factor=step.train_s / training(of_learner) if training(of_learner) else 1.0,
            publish_s=step.publish_s,
            between_s=step.between_s,
            alike_share=step.alike_share,
        )
        for step, scale, count, own, of_learner in zip(
            measured.steps, scales, decode_steps, tokens, trained, strict=True
        )
    ]
    return Rates(decoding, training, tuple(draws))


def fit(
    counts: Sequence[float],
    parts: Sequence[float],
    seconds: Sequence[float],
    otherwise: Callable[[Sequence[float], Sequence[float], Sequence[float]], Rate],
) -> Rate:
    """Fit seconds = fixed_s counts + part_s parts by least squares, neither below 0.

    `otherwise` fits one of the two alone; both are taken where they leave a fifth less of its squared errors.

    >>> fit([1.0, 1.0, 1.0], [10.0, 20.0, 30.0], [3.0, 5.0, 7.0], otherwise=_proportional)
    Rate(fixed_s=1.0, part_s=0.2)
    >>> fit([1.0, 1.0], [10.0, 10.0], [3.0, 5.0], otherwise=_proportional)
    Rate(fixed_s=0.0, part_s=0.4)
    """
    alone = otherwise(counts, parts, seconds)
    cc, pp, cp = _dot(counts, counts), _dot(parts, parts), _dot(counts, parts)
    cs, ps = _dot(counts, seconds), _dot(parts, seconds)
    determinant = cc * pp - cp * cp
    if determinant <= 1e-9 * cc * pp:
        return alone
    both = Rate((cs * pp - ps * cp) / determinant, (cc * ps - cp * cs) / determinant)
    if min(both.fixed_s, both.part_s) < 0.0:
        return alone
    left, left_alone = (_squared_errors(rate, counts, parts, seconds) for rate in (both, alone))
    return both if left < _LESS * left_alone else alone


def _decode_steps(measured: Measurements, config: Config, scale: float, engines: int) -> float:
    """Return the decode steps until the last engine has its share of a training step, the mean of some draws."""
    groups, size = config.rollout.prompts_per_step, config.rollout.group_size
    counted = []
    for seed in range(max(5, _DRAWN_ROLLOUTS // (groups * size))):
        drawing, last = random.Random(seed), 0.0
        for index in range(min(engines, groups)):
            engine = SimulatedEngine(Rate(1.0, 0.0), config.engine.max_num_seqs)
            count = len(range(index, groups, engines)) * size
            lengths = draw_lengths(measured.sequences.lengths, scale, config.rollout.max_new_tokens, count, drawing)
            last = max(last, engine.end_of(engine.submit(lengths, 0.0)))
        counted.append(last)
    return statistics.fmean(counted)


def _constant(counts: Sequence[float], _parts: Sequence[float], seconds: Sequence[float]) -> Rate:
    return Rate(_dot(counts, seconds) / _dot(counts, counts), 0.0)


def _proportional(counts: Sequence[float], parts: Sequence[float], seconds: Sequence[float]) -> Rate:
    if not any(parts):  # no step has trained on anything
        return _constant(counts, parts, seconds)
    return Rate(0.0, _dot(parts, seconds) / _dot(parts, parts))


def _squared_errors(rate: Rate, counts: Sequence[float], parts: Sequence[float], seconds: Sequence[float]) -> float:
    rows = zip(counts, parts, seconds, strict=True)
    return sum((rate.fixed_s * count + rate.part_s * part - own) ** 2 for count, part, own in rows)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
