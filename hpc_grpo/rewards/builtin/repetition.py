"""Built-in reward: a penalty for repeating oneself, from 0.0 (never) towards -1.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import reward


@reward("repetition")
def repetition(prompts: Sequence[str], completions: Sequence[str], ngram: int = 3, **fields: Any) -> list[float]:
    """Return minus the share of word n-grams that have occurred before (arXiv:2502.03373, appendix C.2).

    Fewer words than `ngram` repeat nothing.
    """
    if ngram < 1:
        raise ConfigError(f"repetition: ngram is {ngram}; set rewards.N.args.ngram to 1 or more.")
    return [_penalty(text.lower().split(), ngram) for text in completions]


def _penalty(words: list[str], size: int) -> float:
    total = len(words) - size + 1
    if total < 1:
        return 0.0
    distinct = len({tuple(words[start : start + size]) for start in range(total)})
    return distinct / total - 1.0
