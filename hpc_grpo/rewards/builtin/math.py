"""Built-in reward: 1.0 when the completion's answer equals the reference as mathematics, else 0.0."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_grpo.rewards import Group, reward
from hpc_grpo.rewards.answers import final_answer, plain_verdict, reference_answer
from hpc_grpo.section import Section


def load() -> None:
    from hpc_grpo.rewards.symbolic import are_equal

    are_equal(r"\sqrt{8}", r"2\sqrt{2}")  # the first comparison builds the parser


@reward("math", Section, load=load)
def math(group: Group, settings: Section) -> Iterator[float]:
    r"""Compare each completion with its `answer`: a number, words, or notation such as `\sqrt{8}`, sets, matrices.

    `answers.final_answer` finds a completion's answer.
    """
    wanted = reference_answer(str(group.answer()))
    verdicts: dict[str, bool] = {}  # completions of a group often agree
    for completion in group.completions:
        given = final_answer(completion, wanted)
        if given not in verdicts:
            verdicts[given] = _are_equal(given, wanted)
        yield float(verdicts[given])


def _are_equal(given: str, answer: str) -> bool:
    verdict = plain_verdict(given, answer)
    if verdict is not None:
        return verdict
    from hpc_grpo.rewards.symbolic import are_equal

    return are_equal(given, answer)
