"""The input of a simulation: seconds of a decode step and of a learner's step, and lengths of completions.

`assumed.py` makes rates from a plan, `measured.py` from the steps of a run.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

EXPONENTIAL = tuple(-math.log(1 - percent / 100) for percent in range(1, 100))
"""Lengths with an exponential distribution: half are below 0.7 of the mean."""
LOGNORMAL = tuple(math.exp(statistics.NormalDist(-0.5).inv_cdf((n + 0.5) / 400)) for n in range(400))
"""Lengths with a long tail: half are below 0.6 of the mean, two in a hundred above five times the mean; sigma is 1."""


@dataclass(frozen=True)
class Rate:
    """The seconds of work with n parts: `fixed_s` + `part_s` n."""

    fixed_s: float
    part_s: float

    def __call__(self, parts: float) -> float:
        return self.fixed_s + self.part_s * parts


@dataclass(frozen=True)
class DrawnStep:
    """The deviation of a simulated step: factors on the rates, and added seconds.

    `scale` is the scale of the lengths of its completions.
    """

    scale: float
    sampling_factor: float = 1.0
    training_factor: float = 1.0
    publish_s: float = 0.0
    between_s: float = 0.0
    alike_share: float = 0.0


@dataclass(frozen=True)
class Sequences:
    """Completions' `lengths` as shares of their mean, and the tokens of a prompt.

    An episode has `turns` on average, and its environment takes `environment_s` on average after each turn.
    """

    lengths: tuple[float, ...]
    prompt_tokens: int
    leaves_out: bool = False
    """Learners skip groups whose rewards are all equal."""
    turns: float = 1.0
    environment_s: float = 0.0

    @property
    def are_episodes(self) -> bool:
        return self.turns > 1.0 or self.environment_s > 0.0

    def turns_of(self, length: int, random_: random.Random) -> list[tuple[int, float]]:
        """Cut a rollout of this many tokens into turns; return tokens and the environment's seconds of each turn."""
        if not self.are_episodes:
            return [(length, 0.0)]
        count = max(1, min(length, int(self.turns + random_.random())))
        ends = [length * turn // count for turn in range(count + 1)]
        mean_s = self.environment_s / statistics.fmean(LOGNORMAL)
        return [(end - begin, mean_s * random_.choice(LOGNORMAL)) for begin, end in pairwise(ends)]


@dataclass(frozen=True)
class Rates:
    """`decoding`: a decode step of n sequences in one engine. `training`: a step of n tokens in the fullest learner."""

    decoding: Rate
    training: Rate
    draws: tuple[DrawnStep, ...]
    sequences: Sequences


def draw_lengths(lengths: Sequence[float], scale: float, longest: int, count: int, random_: random.Random) -> list[int]:
    """Draw the tokens of `count` completions."""
    return cut_lengths(random_.choices(lengths, k=count), scale, longest)


def cut_lengths(lengths: Sequence[float], scale: float, longest: int) -> list[int]:
    """Return the tokens of completions: `scale` times each of `lengths`, at most `longest`."""
    return [min(max(1, round(length * scale)), longest) for length in lengths]


def scale_of(lengths: Sequence[float], mean_tokens: float, longest: int) -> float:
    """Return the scale at which the cut lengths have this mean."""
    scale = mean_tokens
    for _ in range(20):
        scale *= mean_tokens / statistics.fmean(cut_lengths(lengths, scale, longest))
    return scale
