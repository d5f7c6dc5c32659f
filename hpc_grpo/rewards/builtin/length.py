"""Built-in reward: shapes the length of completions; at most 0.0, or up to 1.0 around a target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from hpc_grpo.rewards import Group, reward
from hpc_grpo.section import Section


class LengthSettings(Section):
    most: PositiveInt | None = Field(None, description="Longest completion without a penalty.")
    over: PositiveInt | None = Field(None, description="Length over which the penalty falls to -1; null: `most`.")
    target: PositiveInt | None = Field(None, description="Length that scores 1.")
    unit: Literal["words", "characters"] = Field("words", description="What is counted.")

    @model_validator(mode="after")
    def _one_of_both(self) -> LengthSettings:
        if (self.most is None) == (self.target is None):
            raise ValueError(f"must have one of most and target; got most={self.most}, target={self.target}. Set one")
        return self


@reward("length", LengthSettings)
def length(group: Group, settings: LengthSettings) -> Iterator[float]:
    """Return a soft penalty above `most`, or the closeness to `target`, in words or characters.

    With `most`: 0 up to it, then falling to -1 in a straight line over the next `over` (as DAPO's overlong penalty,
    arXiv:2503.14476, equation 13, which counts tokens), -1 beyond. With `target`: 1 - |length - target| / target, and
    0 from twice the target on.
    """
    for text in group.completions:
        size = len(text.split()) if settings.unit == "words" else len(text)
        if settings.target is not None:
            yield max(0.0, 1.0 - abs(size - settings.target) / settings.target)
        else:
            assert settings.most is not None
            yield -min(1.0, max(0, size - settings.most) / (settings.over or settings.most))
