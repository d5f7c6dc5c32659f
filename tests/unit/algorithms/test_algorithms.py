from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.types import Completion, Episode, GroupSamples, Needs
from tests.support.configs import minimal_config
from tests.support.sequences import graded, single_answers


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


def turn(context: list[int], tokens: list[int], *, anew: bool = False, reward: float = 0.0) -> Completion:
    versions = np.full(len(tokens), len(context), np.int32)
    arrays = np.array(tokens, np.int32), -np.array(tokens, np.float32), versions
    return Completion(*arrays, "stop", np.array(context, np.int32), anew, reward)


EPISODE = Episode(
    (turn([2, 3], [7, 8], anew=True), turn([4], [9]), turn([2, 5, 6], [1], anew=True), turn([4, 4], [7, 7])), "stop"
)
"""Two sequences of two turns each."""


def test_consecutive_turns_become_one_sequence_and_a_turn_that_starts_anew_begins_another() -> None:
    one = Episode((turn([2, 3], [6], anew=True),), "stop")
    samples, advantages = GroupSamples(5, (one, EPISODE, one)), (0.5, (1.0, -2.0, 0.0, 4.0), -0.5)
    _, first, second = algorithm_of(minimal_config()).sequences(samples, advantages, (True, True, False))
    assert [(each.ordinal, each.sample_index) for each in (first, second)] == [(5, 1), (5, 4)]
    assert first.token_ids.tolist() == [2, 3, 7, 8, 4, 9]
    assert first.loss_mask.tolist() == [False, False, True, True, False, True]
    assert first.advantages.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, -2.0]
    assert first.engine_logprobs.tolist() == [0.0, 0.0, -7.0, -8.0, 0.0, -9.0]
    assert second.token_ids.tolist() == [2, 5, 6, 1, 4, 4, 7, 7]
    assert second.advantages.tolist() == [0.0] * 6 + [4.0, 4.0]
    assert second.policy_versions is not None
    assert second.policy_versions.tolist() == [0, 0, 0, 3, 0, 0, 2, 2]


def test_a_sequence_has_the_experts_of_the_turn_that_first_computed_a_token() -> None:
    """Turns t give token i of their sequence the expert 10 t + i; the last sampled token of a turn has none yet."""
    first, second = turn([2, 3], [7, 8], anew=True), turn([4], [9])
    of_first, of_second = (np.arange(10 * t, 10 * t + n, dtype=np.uint8)[:, None, None] for t, n in ((1, 3), (2, 5)))
    first = replace(first, experts=of_first).as_turn(first.context_ids, starts_anew=True)
    second = replace(second, experts=of_second).as_turn(second.context_ids, starts_anew=False)
    samples = GroupSamples(5, (Episode((first, second), "stop"),))
    [sequence] = algorithm_of(minimal_config()).sequences(samples, (0.5,), (True,))
    assert sequence.token_ids.tolist() == [2, 3, 7, 8, 4, 9]
    assert sequence.experts[:, 0, 0].tolist() == [10, 11, 12, 23, 24, 24]
    assert sequence.experts.dtype == np.uint8


def test_with_a_critic_the_end_of_a_sequence_that_another_one_follows_has_the_later_rewards() -> None:
    algorithm = algorithm_of(minimal_config(task="ppo"))
    turns = {"turn_rewards": ((1.0, 0.0, 2.0, 4.0), (1.0, 2.0)), "num_sequences": (2, 1)}
    grades = graded(8.0, 3.0, valid=(True, False), num_completion_tokens=(6, 6), **turns)
    rewards = algorithm.advantages(grades)
    assert rewards == [(1.0, 0.0, 2.0, 5.0), 0.0], "1.0 is no environment's: it counts for the last turn"
    first, second = algorithm.sequences(GroupSamples(5, (EPISODE, EPISODE)), rewards, grades.valid)
    assert first.advantages.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 7.0]
    assert second.advantages.tolist() == [0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 5.0, 5.0]
    assert (algorithm.num_sequences(grades), algorithm.num_trained_tokens(grades)) == (2, 6)


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
    grades = graded(1.0, 0.0)
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
    grades = graded(1.0, 0.0)
    assert algorithm_of(config).advantages(grades) == (0.0, -1.0)


def test_an_advantage_of_the_users_may_see_the_rewards_of_turns_and_give_one_number_for_each(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def last(rewards, valid, turn_rewards, by=1): return [[by * r for r in own] for own in turn_rewards]"
    )
    algorithm = algorithm_of(minimal_config(loss={"advantage": {"name": f"{tmp_path}/own.py:last", "args": {"by": 2}}}))
    grades = graded(1.0, 0.0)
    assert algorithm.advantages(grades) == ((2.0,), (0.0,))
    assert algorithm.advantages(replace(grades, turn_rewards=((0.0, 0.5), (0.0,)))) == ((0.0, 2.0), (0.0,))
    assert not algorithm.teaches(replace(grades, rewards=(0.0, 0.0), turn_rewards=((0.0, 0.0), (0.0,))))


def test_a_distillation_weighs_the_advantages_of_turns() -> None:
    distill = {"name": "distill", "args": {"teacher": "org/large", "reward_coef": 0.5}}
    algorithm = algorithm_of(
        minimal_config(task=distill, loss={"advantage": {"name": "turns", "normalize_std": False}})
    )
    grades = graded(1.0, 0.0, turn_rewards=((0.0, 1.0), (0.0,)))
    assert algorithm.step_advantages([grades]) == [[(0.25, 0.0), (-0.25,)]]
