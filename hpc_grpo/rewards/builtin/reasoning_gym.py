"""Built-in reward: the score that a task of reasoning-gym gives to the completion's answer, from 0.0 to 1.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from hpc_grpo.data.sources.reasoning_gym import make_task, read_metadata
from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import reward
from hpc_grpo.rewards.answers import given_answer

try:
    import reasoning_gym as _package  # noqa: F401 - seconds, which must not count against the first call's deadline
except ImportError as error:
    raise ConfigError("The reward reasoning_gym needs the package of that name: install hpc-grpo[tasks].") from error


@reward("reasoning_gym")
def reasoning_gym(
    prompts: Sequence[str], completions: Sequence[str], partial: bool = True, **fields: Sequence[Any]
) -> list[float]:
    """Ask the scorer of the item's task; without `partial`, only a full score counts.

    The answer is the last `\\boxed{}`, `<answer>` element or `####`, else the whole completion.
    """
    if not {"task", "task_args", "metadata", "question", "answer"} <= fields.keys():
        raise ConfigError("reasoning_gym scores items of reasoning_gym:TASK alone; give other data other rewards.")
    scores = []
    for position, completion in enumerate(completions):
        item = {name: values[position] for name, values in fields.items()}
        entry = {
            "question": item["question"],
            "answer": item["answer"] or None,
            "metadata": read_metadata(item["metadata"]),
        }
        given = given_answer(completion)
        score = _score(_task(item["task"], item["task_args"]), completion.strip() if given is None else given, entry)
        scores.append(score if partial else float(score >= 1.0))
    return scores


def _score(task: Any, given: str, entry: Mapping[str, Any]) -> float:
    """Return the task's score; 0.0 where its scorer raises, as some do over text that is no answer of theirs."""
    try:
        return float(task.score_answer(given, entry))
    except Exception:  # noqa: BLE001 - prime_factorization, say, reads every word as a number
        # One that raises over its own answer is broken, and a 0 would hide that.
        if entry["answer"] is not None:
            task.score_answer(entry["answer"], entry)
        return 0.0


_task = cache(make_task)
