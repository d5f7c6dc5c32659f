from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.types import GroupGrades
from tests.support.configs import minimal_config

FILE = Path(__file__).parents[3] / "examples" / "hard_prompts_advantage.py"


@pytest.mark.parametrize(("args", "difficulty"), [({}, 0.75), ({"power": 2}, 0.5625)])
def test_an_advantage_outside_the_package_is_asked_with_its_own_settings(args: Any, difficulty: float) -> None:
    config = minimal_config(loss={"advantage": {"name": f"{FILE}:hard_prompts", "args": args}})
    grades = GroupGrades(
        ordinal=0,
        rewards=(1.0, 0.0, 0.0, 0.0, 9.0),
        reward_parts={},
        valid=(True, True, True, True, False),
        num_completion_tokens=(3,) * 5,
        truncated=(False,) * 5,
        min_policy_versions=(0,) * 5,
        mean_policy_versions=(0.0,) * 5,
    )
    (advantages,) = algorithm_of(config).step_advantages([grades])
    assert advantages == pytest.approx([0.75 * difficulty, *[-0.25 * difficulty] * 3, 0.0])


def test_it_takes_less_than_thirty_lines() -> None:
    assert len(FILE.read_text().splitlines()) < 30
