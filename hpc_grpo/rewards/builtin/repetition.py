"""Built-in reward: a penalty for repeating oneself, from 0.0 (never) towards -1.0."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field, PositiveInt

from hpc_grpo.rewards import Group, reward
from hpc_grpo.section import Section


class RepetitionSettings(Section):
    ngram: PositiveInt = Field(3, description="Words in a row that count as a repetition.")


@reward("repetition", RepetitionSettings)
def repetition(group: Group, settings: RepetitionSettings) -> Iterator[float]:
    """Return minus the share of word n-grams that have occurred before (arXiv:2502.03373, appendix C.2).

    Fewer words than `ngram` repeat nothing.
    """
    for text in group.completions:
        words = text.lower().split()
        ngrams = list(zip(*(words[start:] for start in range(settings.ngram)), strict=False))
        yield len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0
