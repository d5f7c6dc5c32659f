"""The built-in rewards. A file is imported when a config names one of its rewards."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from hpc_grpo.section import Section


class ScoredHere(Section):
    """Settings of a built-in that scores in the reward worker itself."""

    completion_s: PositiveFloat = Field(
        1.0, description="Processor time limit of one completion. A slower completion gets the worst score."
    )
