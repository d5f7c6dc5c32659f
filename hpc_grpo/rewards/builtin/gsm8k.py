"""Built-in reward: 1.0 when the completion's number equals GSM8K's, else 0.0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import Group, reward
from hpc_grpo.rewards.answers import (
    after_hashes,
    after_thoughts,
    last_number,
    parse_number,
    plain_characters,
    stated_number,
)
from hpc_grpo.section import Section


class Gsm8kSettings(Section):
    method: Literal["strict", "flexible"] = Field(
        "strict", description="strict: the number after ####; flexible: the last number."
    )


@reward("gsm8k", Gsm8kSettings)
def gsm8k(group: Group, settings: Gsm8kSettings) -> Iterator[float]:
    """Compare numbers with that after `####` in the column `answer` (GSM8K, arXiv:2110.14168).

    `strict` takes the completion's number from behind `####` alone, which also trains the format; `flexible` takes
    its last number.
    """
    reference = str(group.answer())
    wanted = parse_number(after_hashes(reference) or reference)
    if wanted is None:
        raise ConfigError(f"the answer {reference!r} ends in no number behind ####. Use the reward math.")
    for completion in group.completions:
        text = plain_characters(after_thoughts(completion))
        given = last_number(text) if settings.method == "flexible" else stated_number(after_hashes(text) or "")
        yield float(given == wanted)
