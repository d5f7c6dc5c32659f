from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.types import Completion, GroupGrades, Needs
from tests.support.configs import minimal_config
from tests.support.sequences import single_answers


@pytest.mark.parametrize(
    ("sections", "needs"),
    [
        ({}, Needs(rollouts=True)),
        ({"loss": {"kl": {"coef": 0.1}}}, Needs(rollouts=True, reference=True)),
        ({"task": "sft"}, Needs(labels=True)),
    ],
)
def test_a_config_knows_what_its_task_needs(sections: dict[str, Any], needs: Needs) -> None:
    assert minimal_config(**sections).needs == needs


def completion(tokens: list[int], logprobs: list[float]) -> Completion:
    return Completion(
        np.array(tokens, np.int32), np.array(logprobs, np.float32), np.zeros(len(tokens), np.int32), "stop"
    )


def test_a_rollout_becomes_a_sequence_whose_completion_has_its_advantage() -> None:
    completions = (completion([7, 8], [-1.0, -2.0]), completion([9], [-3.0]), completion([7, 1, 1], [-4.0] * 3))
    samples = single_answers(5, [2, 3], completions)
    sequences = algorithm_of(minimal_config()).sequences(samples, (0.5, 9.0, -0.5), (True, False, True))
    assert [(each.ordinal, each.sample_index) for each in sequences] == [(5, 0), (5, 2)]
    first, second = sequences
    assert first.token_ids.tolist() == [2, 3, 7, 8]
    assert first.loss_mask.tolist() == [False, False, True, True]
    assert first.advantages.tolist() == [0.0, 0.0, 0.5, 0.5]
    assert first.engine_logprobs.tolist() == [0.0, 0.0, -1.0, -2.0]
    assert second.advantages.tolist() == [0.0, 0.0, -0.5, -0.5, -0.5]
    assert {array.dtype for array in (first.advantages, first.engine_logprobs)} == {np.dtype(np.float32)}


@pytest.mark.parametrize(("normalize_std", "advantages"), [(False, (0.5, -0.5)), (True, (0.70700681, -0.70700681))])
def test_grpo_compares_the_rewards_of_a_group(normalize_std: bool, advantages: tuple[float, ...]) -> None:
    grades = GroupGrades(0, (1.0, 0.0), {}, (True, True), (1, 1), (False, False), (0, 0), (0.0, 0.0))
    algorithm = algorithm_of(minimal_config(loss={"advantage": {"normalize_std": normalize_std}}))
    assert tuple(algorithm.advantages(grades)) == pytest.approx(advantages)


_OWN_ALGORITHM = """
from hpc_grpo.algorithms.tasks import Grpo
from hpc_grpo.types import Needs

class WithCritic(Grpo):
    @property
    def needs(self):
        return Needs(rollouts=True, critic=True)
"""


def test_an_algorithm_and_an_advantage_may_be_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(_OWN_ALGORITHM)
    best = "def best(rewards, valid): return [reward - max(rewards) for reward in rewards]"
    (tmp_path / "best.py").write_text(best)
    config = minimal_config(task=f"{tmp_path}/own.py:WithCritic", loss={"advantage": f"{tmp_path}/best.py:best"})
    assert config.needs == Needs(rollouts=True, critic=True)
    grades = GroupGrades(0, (1.0, 0.0), {}, (True, True), (1, 1), (False, False), (0, 0), (0.0, 0.0))
    assert algorithm_of(config).advantages(grades) == [0.0, -1.0]
