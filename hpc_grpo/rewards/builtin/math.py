"""Built-in reward: 1.0 when the completion's answer equals the reference as mathematics, else 0.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import reward
from hpc_grpo.rewards.answers import given_answer, last_line, last_number, parse_number, plain_verdict, reference_answer


def prepare(pair_timeout_s: float = 1.0, **args: Any) -> None:
    """Read the libraries once on each node: from a cold file system that takes longer than a call may."""
    if pair_timeout_s <= 0:
        raise ConfigError(f"math: pair_timeout_s is {pair_timeout_s}; set rewards.N.args.pair_timeout_s above 0.")
    from hpc_grpo.rewards import symbolic  # noqa: F401


@reward("math", prepare=prepare)
def math(
    prompts: Sequence[str],
    completions: Sequence[str],
    answer: Sequence[Any] | None = None,
    pair_timeout_s: float = 1.0,
    **fields: Any,
) -> list[float]:
    r"""Compare each completion with its `answer`: a number, words, or notation such as `\sqrt{8}`, sets, matrices.

    A completion's answer is its last `\boxed{}`, `<answer>` element or what follows `####`; without any of them the
    last number, or the last line where the reference is no number. One that cannot be compared within
    `pair_timeout_s` of processor time, since its simplification never ends, is wrong; the others are judged as ever.
    """
    if answer is None:
        raise ConfigError("math compares with a reference answer; set data.*.answer_field to its column.")
    verdicts: dict[tuple[str, str], bool] = {}  # completions of a group often agree, also on what never ends
    scores = []
    for completion, reference in zip(completions, answer, strict=True):
        wanted = reference_answer(str(reference))
        given = given_answer(completion)
        if given is None and (number := parse_number(wanted)) is not None:
            scores.append(float(last_number(completion) == number))
            continue
        pair = (last_line(completion) if given is None else given, wanted)
        if pair not in verdicts:
            verdicts[pair] = _are_equal(*pair, pair_timeout_s)
        scores.append(float(verdicts[pair]))
    return scores


def _are_equal(given: str, answer: str, timeout_s: float) -> bool:
    verdict = plain_verdict(given, answer)
    if verdict is not None:
        return verdict
    # Here: sympy takes half a second to import, and a worker whose answers are plain does without.
    from hpc_grpo.rewards.symbolic import judge

    try:
        return judge().are_equal(given, answer, timeout_s)
    except ChildProcessError:
        return False
