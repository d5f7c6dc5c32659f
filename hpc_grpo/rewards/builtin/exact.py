"""Built-in reward: 1.0 when the completion's answer is the reference's text, else 0.0."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_grpo.rewards import Group, reward
from hpc_grpo.rewards.answers import answer_blocks, given_answer, is_same_text, plain_characters
from hpc_grpo.section import Section


@reward("exact", Section)
def exact(group: Group, settings: Section) -> Iterator[float]:
    """Compare texts: the marked or announced answer, else the whole completion, with the column `answer`.

    Case, punctuation and notation count: 0.5 is not 1/2. Digits of any script and line ends are those of ASCII. Marks
    around the answer, such as bold and quotes, and a dot at its end do not count.
    """
    wanted = plain_characters(str(group.answer())).strip()
    for completion in group.completions:
        whole = plain_characters(answer_blocks(completion, ())[-1]).strip()
        given = given_answer(completion)
        yield float(wanted == whole != "" or is_same_text(whole if given is None else given, wanted))
