from __future__ import annotations

from typing import Any

import pytest
import reasoning_gym as package

from hpc_grpo.config import SourceConfig
from hpc_grpo.data.sources import read_items
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import REWARDS


def score(item: dict[str, Any], *completions: str, **args: Any) -> list[float]:
    columns = {name: [value] * len(completions) for name, value in item.items()}
    found: list[float] = REWARDS.find("reasoning_gym")(prompts=[""], completions=completions, **columns, **args)
    return found


def first_item(task: str, **args: Any) -> dict[str, Any]:
    return next(read_items(SourceConfig(path=f"reasoning_gym:{task}", args={"size": 1, **args})))


def test_an_answer_scores_wherever_it_is_marked() -> None:
    item = first_item("gcd")
    right = item["answer"]
    marked = [right, f"so <answer>{right}</answer>", f"it is \\boxed{{{right}}}.", f"#### {right}", "#### 0", ""]
    assert score(item, *marked) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_a_scorer_that_raises_over_a_wrong_answer_scores_it_zero() -> None:
    item = first_item("prime_factorization")
    with pytest.raises(ValueError, match="invalid literal"):
        package.create_dataset("prime_factorization").score_answer("I do not know", item)
    assert score(item, "I do not know", item["answer"]) == [0.0, 1.0]


def test_a_scorer_that_raises_over_its_own_answer_fails() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        score({**first_item("prime_factorization"), "answer": "seven"}, "I do not know")


def test_a_grid_of_tuples_is_scored_as_its_task_made_it() -> None:
    """Through plain JSON its tuples became lists, which the scorer never finds equal."""
    item = first_item("rearc")
    assert score(item, item["answer"]) == [1.0]


def test_partial_scores_can_be_refused() -> None:
    item = first_item("gcd")
    wordy = f"the answer is {item['answer']}"
    [some] = score(item, wordy)
    assert 0.0 < some < 1.0
    assert score(item, wordy, item["answer"], partial=False) == [0.0, 1.0]


def test_other_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="items of reasoning_gym:TASK alone"):
        score({"answer": "1"}, "1")
