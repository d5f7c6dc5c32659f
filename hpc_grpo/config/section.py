"""The base of every section: unknown keys are errors, and nothing changes after loading."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A section of the YAML file. The description of a field is what `hpc-grpo config` prints beside its key."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
