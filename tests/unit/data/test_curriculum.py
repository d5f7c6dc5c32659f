from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpc_grpo.config import CurriculumConfig, SourceConfig
from hpc_grpo.data.curriculum import Curriculum, difficulty_ranks
from hpc_grpo.data.stream import Place, PromptStream
from hpc_grpo.errors import ConfigError
from tests.support.sequences import graded


class FourItems:
    """A stream of one source, in order: ordinal o is item o % 4 in its turn o // 4."""

    parts = (SimpleNamespace(numbers=range(4), difficulty=None),)

    def __len__(self) -> int:
        return 4

    def place(self, ordinal: int) -> Place:
        turn, item = divmod(ordinal, 4)
        return Place(turn, 0, item, turn)


def turns_asked(curriculum: Curriculum, item: int, means: Sequence[float], num_turns: int = 8) -> list[int]:
    """The turns in which an item is asked, whose groups have these mean rewards and then the last one."""
    stream: Any = FourItems()
    asked: list[int] = []
    for turn in range(num_turns):
        ordinal = 4 * turn + item
        if curriculum.next_awake(stream, ordinal) == ordinal:
            curriculum.note(stream.place(ordinal), graded(means[min(len(asked), len(means) - 1)]))
            asked.append(turn)
    return asked


@pytest.mark.parametrize(
    ("settings", "means", "asked"),
    [
        ({}, [1.0], [0, 1]),
        ({"after": 1}, [1.0], [0]),
        ({"after": 2}, [1.0, 0.9, 1.0], [0, 1, 2, 3]),
        ({"after": 1, "easy_rest": 2}, [1.0], [0, 3, 6]),
        ({"after": 2, "easy_rest": 2}, [1.0], [0, 1, 4, 7]),
        ({"after": 1, "easy_rest": 2, "easy_from": 0.7}, [0.7, 0.6], [0, 3, 4, 5, 6, 7]),
        ({"after": 1}, [0.0], [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"after": 1, "hard_to": 0.0}, [0.0], [0, 2, 4, 6]),
        ({"after": 1, "hard_to": 0.2, "hard_rest": None}, [0.3, 0.2], [0, 1]),
        ({"after": 2, "hard_to": 0.0, "easy_rest": 0}, [0.0, 1.0, 0.0, 0.0, 0.5], [0, 1, 2, 3, 5, 6, 7]),
    ],
)
def test_a_prompt_rests_after_so_many_easy_or_hard_groups_in_a_row(
    settings: dict[str, Any], means: list[float], asked: list[int]
) -> None:
    assert turns_asked(Curriculum(CurriculumConfig(**settings), {}), 2, means) == asked


def test_the_mean_of_equal_rewards_is_not_missed_by_its_rounding() -> None:
    curriculum = Curriculum(CurriculumConfig(easy_from=0.1 + 0.2, after=1), {})
    curriculum.note(Place(0, 0, 0, 0), graded(*[0.3] * 7))
    assert curriculum.metrics()["curriculum/retired"] == 1.0


def test_a_failed_reward_says_nothing_of_its_prompt() -> None:
    curriculum = Curriculum(CurriculumConfig(hard_to=0.0), {})
    curriculum.note(Place(0, 0, 0, 0), graded(0.0, 0.0))
    before = curriculum.known
    curriculum.note(Place(1, 0, 0, 1), graded(0.0, 0.0, valid=(False, False), errors=("sympy is gone",)))
    assert curriculum.known == before == {"0:0": (-1, 1)}


def test_what_is_known_comes_back_from_json() -> None:
    curriculum = Curriculum(CurriculumConfig(after=1, easy_rest=1, hard_to=0.0, hard_rest=None), {})
    for item, mean in enumerate((1.0, 0.0, 0.5)):
        curriculum.note(Place(0, 0, item, 0), graded(mean))
    again = Curriculum(CurriculumConfig(), json.loads(json.dumps(curriculum.known)))
    assert again.known == curriculum.known == {"0:0": (1, 2), "0:1": (-1, None)}
    assert curriculum.metrics() == {"curriculum/easy": 1.0, "curriculum/hard": 1.0, "curriculum/retired": 1.0}


def test_where_all_prompts_rest_for_ever_none_is_awake() -> None:
    stream: Any = FourItems()
    curriculum = Curriculum(CurriculumConfig(after=1), {f"0:{item}": (1, None) for item in (0, 1, 3)})
    assert curriculum.next_awake(stream, 3) == 6
    curriculum.note(stream.place(6), graded(1.0))
    assert curriculum.next_awake(stream, 7) is None


def test_items_that_the_data_no_longer_has_do_not_count_among_those_that_rest() -> None:
    """As --accept-changes may bring about."""
    stream: Any = FourItems()
    gone = {"0:4": (1, None), "0:5": (1, None)}
    retired = Curriculum(CurriculumConfig(), gone | {f"0:{item}": (1, None) for item in range(4)})
    assert retired.next_awake(stream, 0) is None
    resting = Curriculum(CurriculumConfig(), gone | {"0:0": (1, None), "0:1": (1, None), "0:2": (2, 9), "0:3": (2, 9)})
    assert resting.next_awake(stream, 0) == 9 * 4 + 2


def test_a_prompt_that_will_be_back_is_waited_for() -> None:
    stream: Any = FourItems()
    known = {f"0:{item}": (1, None) for item in range(3)} | {"0:3": (1, 5)}
    assert Curriculum(CurriculumConfig(), known).next_awake(stream, 0) == 4 * 5 + 3


def ranked(values: Sequence[Any]) -> Any:
    rows = [SimpleNamespace(fields=json.dumps({"level": value})) for value in values]
    part: Any = SimpleNamespace(numbers=np.arange(len(values)), rows=rows, source=SourceConfig(path="d.jsonl"))
    part.difficulty = difficulty_ranks(part, "level")
    return part


def test_ranks_are_the_share_of_easier_items_and_equals_have_the_same() -> None:
    assert ranked([3, 1, 1.0, 9, 3]).difficulty.tolist() == [0.4, 0.0, 0.0, 0.8, 0.4]


@pytest.mark.parametrize("value", [None, "3", True, float("nan")])
def test_a_difficulty_that_is_no_number_is_an_error_with_its_item(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"Item 1 of d\.jsonl .*difficulty_field\) must be a number"):
        ranked([1, value])


def test_harder_prompts_come_in_by_the_square_root_of_the_way() -> None:
    """Of 100 items, as hard as their place, in order: at ordinal t the ranks below sqrt(t / 200) are asked."""
    part = ranked(range(100))
    stream = PromptStream([part], 0, shuffle=False)
    curriculum = Curriculum(CurriculumConfig(difficulty_field="level", difficulty_epochs=2.0), {})
    asked, ordinal = list[int](), 0
    while (found := curriculum.next_awake(stream, ordinal)) is not None and found < 300:
        asked.append(found)
        ordinal = found + 1
    assert asked[0] == 0
    for ordinal in range(300):
        share = (ordinal / 200 * (1 - 1e-4) + 1e-4) ** 0.5
        assert (ordinal in asked) == (ordinal % 100 / 100 < share)
    assert [ordinal for ordinal in asked if ordinal >= 200] == list(range(200, 300))


def test_an_episode_whose_environment_failed_says_nothing_of_its_prompt() -> None:
    curriculum, place = Curriculum(CurriculumConfig(after=1), {}), Place(0, 0, 2, 0)
    curriculum.note(place, graded(0.0, 0.0, failures=("gone", "gone")))
    assert curriculum.known == {}
    curriculum.note(place, graded(1.0, 0.0, failures=("", "gone")))
    assert curriculum.known == {"0:2": (1, None)}
