"""Built-in reward: 1.0 when the completion's answer equals the reference, else 0.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import reward
from hpc_grpo.rewards.answers import is_correct, reference_answer


@reward("correctness")
def correctness(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any] | None = None, **fields: Any
) -> list[float]:
    """Compare each completion with its `answer`: GSM8K's form (… #### 42), a number, a `\\boxed{}` or a text."""
    if answer is None:
        raise ConfigError("correctness compares with a reference answer; set data.*.answer_field to its column.")
    return [
        float(is_correct(completion, reference_answer(str(reference))))
        for completion, reference in zip(completions, answer, strict=True)
    ]
