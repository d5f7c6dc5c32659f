"""Built-in reward: the overlap of words between the completion's answer and the reference."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator

from hpc_grpo.rewards import Group, reward
from hpc_grpo.rewards.answers import after_thoughts, given_answer, plain_characters
from hpc_grpo.section import Section

_PUNCTUATION = str.maketrans("", "", string.punctuation)


@reward("string_f1", Section)
def string_f1(group: Group, settings: Section) -> Iterator[float]:
    """Return the F1 of words as SQuAD's evaluation has it (arXiv:1606.05250), the best over several references.

    Case, punctuation and English articles do not count. The marked or announced answer is compared, else the whole
    completion behind its thoughts. `answer` is a text, or a list of texts of which one suffices.
    """
    references = group.answer(list)
    accepted = [_words(str(each)) for each in (references if isinstance(references, list) else [references])]
    for completion in group.completions:
        given = _words(given_answer(completion) or after_thoughts(completion))
        yield max((_f1(given, wanted) for wanted in accepted), default=0.0)


def _words(text: str) -> list[str]:
    return re.sub(r"\b(?:a|an|the)\b", " ", plain_characters(text).lower().translate(_PUNCTUATION)).split()


def _f1(given: list[str], wanted: list[str]) -> float:
    if not given or not wanted:
        return float(given == wanted)
    common = (Counter(given) & Counter(wanted)).total()
    return 2.0 * common / (len(given) + len(wanted))
