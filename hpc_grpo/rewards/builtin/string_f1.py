"""Built-in reward: the overlap of words between the completion's answer and the reference."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import reward
from hpc_grpo.rewards.answers import given_answer

_PUNCTUATION = str.maketrans("", "", string.punctuation)


@reward("string_f1")
def string_f1(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any] | None = None, **fields: Any
) -> list[float]:
    """Return the F1 of words as SQuAD's evaluation has it (arXiv:1606.05250), the best over several references.

    Case, punctuation and English articles do not count. The marked answer is compared where there is one (see `math`),
    else the whole completion. `answer` is a text, or a list of texts of which one suffices.
    """
    if answer is None:
        raise ConfigError("string_f1 compares with a reference text; set data.*.answer_field to its column.")
    scores = []
    for completion, references in zip(completions, answer, strict=True):
        given = _words(given_answer(completion) or completion)
        accepted = references if isinstance(references, list | tuple) else [references]
        scores.append(max((_f1(given, _words(str(reference))) for reference in accepted), default=0.0))
    return scores


def _words(text: str) -> list[str]:
    return re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _f1(given: list[str], wanted: list[str]) -> float:
    if not given or not wanted:
        return float(given == wanted)
    common = (Counter(given) & Counter(wanted)).total()
    return 2.0 * common / (len(given) + len(wanted))
