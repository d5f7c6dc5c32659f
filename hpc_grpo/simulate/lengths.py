"""How long the completions of a simulation are: those of a run, or assumed ones, drawn in shares of their mean."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

EXPONENTIAL = tuple(-math.log(1 - percent / 100) for percent in range(1, 100))
"""Lengths of which half are below 0.7 of the mean."""
LOGNORMAL = tuple(math.exp(statistics.NormalDist(-0.5).inv_cdf((n + 0.5) / 400)) for n in range(400))
"""Lengths with a tail: half are below 0.6 of the mean, two in a hundred above five times it; sigma is 1."""


@dataclass(frozen=True)
class Sequences:
    """Tells what is sampled and trained on: completions' `lengths` in shares of their mean, and the prompts' tokens."""

    lengths: tuple[float, ...]
    prompt_tokens: int
    leaves_out: bool
    """Learners compute nothing of groups that are all alike."""


def draw_lengths(lengths: Sequence[float], scale: float, longest: int, count: int, random_: random.Random) -> list[int]:
    """Draw the tokens of `count` completions: `scale` times one of `lengths` each, `longest` at most."""
    return cut_lengths(random_.choices(lengths, k=count), scale, longest)


def cut_lengths(lengths: Sequence[float], scale: float, longest: int) -> list[int]:
    """Return the tokens of each of `lengths`, `longest` at most."""
    return [min(max(1, round(length * scale)), longest) for length in lengths]


def scale_of(lengths: Sequence[float], mean_tokens: float, longest: int) -> float:
    """Return the scale at which lengths that are cut have this mean."""
    scale = mean_tokens
    for _ in range(20):
        scale *= mean_tokens / statistics.fmean(cut_lengths(lengths, scale, longest))
    return scale
