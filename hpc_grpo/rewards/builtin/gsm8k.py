"""Built-in reward: 1.0 when the completion's number equals GSM8K's, else 0.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import reward
from hpc_grpo.rewards.answers import after_hashes, last_number, parse_number


@reward("gsm8k")
def gsm8k(
    prompts: Sequence[str],
    completions: Sequence[str],
    answer: Sequence[Any] | None = None,
    method: str = "strict",
    **fields: Any,
) -> list[float]:
    """Compare numbers with that after `####` in the column `answer` (GSM8K, arXiv:2110.14168).

    `strict` takes the completion's number from behind `####` alone, which also trains the format; `flexible` takes
    its last number.
    """
    if method not in ("strict", "flexible"):
        raise ConfigError(f"gsm8k: method is {method!r}; set rewards.N.args.method to strict or flexible.")
    if answer is None:
        raise ConfigError("gsm8k compares with a reference answer; set data.*.answer_field to its column.")
    scores = []
    for completion, reference in zip(completions, answer, strict=True):
        wanted = parse_number(after_hashes(str(reference)) or str(reference))
        if wanted is None:
            raise ConfigError(f"gsm8k: the answer {str(reference)!r} ends in no number behind ####; use math.")
        given = last_number(completion) if method == "flexible" else parse_number(after_hashes(completion) or "")
        scores.append(float(given == wanted))
    return scores
