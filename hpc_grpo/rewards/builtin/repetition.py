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
        yield _penalty(text.lower().split(), settings.ngram)


def _penalty(words: list[str], size: int) -> float:
    total = len(words) - size + 1
    if total < 1:
        return 0.0
    distinct = len({tuple(words[start : start + size]) for start in range(total)})
    return distinct / total - 1.0
