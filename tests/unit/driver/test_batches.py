from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_grpo.config.resources import budget_of
from hpc_grpo.data.curriculum import Curriculum
from hpc_grpo.driver.batches import DemonstrationBatches, RolloutBatches, TrainItem
from hpc_grpo.driver.rollouts import GradedGroup, StepGroups
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.split import cost
from hpc_grpo.metrics.record import StepTimer
from hpc_grpo.types import Demonstration, GroupGrades, Prompt, TrainSequence
from tests.support.configs import minimal_config


def group(ordinal: int, **changes: Any) -> GradedGroup:
    values: dict[str, Any] = {
        "ordinal": ordinal,
        "rewards": (1.5, 0.5),
        "reward_parts": {"correctness": (1.0, 0.0), "strict_format": (0.5, 0.5)},
        "valid": (True, True),
        "num_completion_tokens": (4, 8),
        "truncated": (False, True),
        "min_policy_versions": (5, 5),
        "mean_policy_versions": (5.0, 5.5),
        "num_prompt_tokens": 2,
    }
    prompt = Prompt(ordinal, 0, (1, 2), f"What is {ordinal}?", {"answer": "3"})
    return GradedGroup(prompt, f"samples {ordinal}", GroupGrades(**{**values, **changes}))


class FakeScheduler:
    pool = SimpleNamespace(restarts=lambda: {"engine/restarts": 2, "grading/restarts": 1})
    curriculum: Curriculum | None = None
    ahead: Sequence[int] = ()

    def __init__(self, trained: Sequence[GradedGroup], dropped: Sequence[GradedGroup] = ()) -> None:
        last = max(group.prompt.ordinal for group in (*trained, *dropped))
        self._step = StepGroups(range(last + 1), trained, dropped)

    def take_step(self, policy_version: int) -> StepGroups:
        return self._step


class FakeDemonstrations:
    def demonstration(self, ordinal: int) -> Demonstration:
        return Demonstration(ordinal, 0, (5,) * (ordinal + 1), (7, 8))


def batches(groups: Sequence[GradedGroup], num_minibatches: int = 1) -> RolloutBatches:
    config = minimal_config(loss={"advantage": {"normalize_std": False}}, train={"num_minibatches": num_minibatches})
    scheduler: Any = FakeScheduler(groups)
    return RolloutBatches(config, scheduler)


def data_of(items: Sequence[TrainItem]) -> list[Any]:
    return [item.data for item in items]


def test_a_group_goes_to_a_learner_with_its_advantages_and_its_valid_tokens() -> None:
    invalid = group(1, valid=(True, False))
    batch = batches([group(0), invalid]).take_step(6, StepTimer())
    [first, second] = batch.minibatches[0]
    assert data_of([first])[0].advantages == (0.5, -0.5)
    assert data_of([second])[0].advantages == (0.0, 0.0), "a group with one valid rollout compares nothing"
    assert [item.num_trained_tokens for item in (first, second)] == [12, 4]
    assert first.cost > 12
    assert second.cost == 0.0, "no learner computes it"
    assert list(batch.ordinals) == [0, 1]
    assert (batch.metrics["lag/max"], batch.metrics["engine/restarts"]) == (1.0, 2)


def played(ordinal: int, **changes: Any) -> GradedGroup:
    """A group of episodes of two turns and of one."""
    values: dict[str, Any] = {
        "turn_rewards": ((0.0, 1.0), (0.5,)),
        "num_prompt_tokens": 5,
        "num_observed_tokens": (3, 0),
        "num_sequences": (2, 1),
        "failures": ("", ""),
    }
    return group(ordinal, **{**values, **changes})


def test_an_episode_counts_its_sequences_and_all_its_tokens_and_tells_the_reward_of_each_turn() -> None:
    config = minimal_config(loss={"advantage": {"name": "turns", "normalize_std": False}})
    scheduler: Any = FakeScheduler([played(0, texts=("a", "b")), group(1)])
    batch = RolloutBatches(config, scheduler).take_step(6, StepTimer())
    [episodes, answers] = batch.minibatches[0]
    assert data_of([episodes])[0].advantages == ((0.5, 0.0), (-0.5,))
    assert data_of([answers])[0].advantages == (0.5, -0.5)
    assert [(item.num_trained_tokens, item.num_sequences) for item in (episodes, answers)] == [(12, 3), (12, 2)]
    assert episodes.cost == cost(5, [4 + 3, 8], is_shared=budget_of(config).shares_prompts)
    assert batch.metrics["tokens/sequence_mean"] == (5 + 4 + 3 + 5 + 8 + 2 + 4 + 2 + 8) / 4
    assert [(line["advantage"], line["turn_rewards"]) for line in batch.lines] == [
        ((0.5, 0.0), (0.0, 1.0)),
        ((-0.5,), (0.5,)),
    ]


@pytest.mark.parametrize("given", ["(1.0,)", "(1.0, float('nan'))", "(1.0, (1.0, 2.0))", "((float('inf'),), 1.0)"])
def test_advantages_of_a_users_function_that_are_too_few_or_not_finite_are_a_config_error(
    tmp_path: Path, given: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def advantage(rewards, valid): return {given}\n")
    scheduler: Any = FakeScheduler([group(0)])
    config = minimal_config(loss={"advantage": f"{tmp_path / 'mine.py'}:advantage"})
    with pytest.raises(ConfigError, match=r"loss\.advantage must give 2 finite numbers for a group"):
        RolloutBatches(config, scheduler).take_step(0, StepTimer())


@pytest.mark.parametrize(
    ("given", "says"), [("None", "TypeError"), ("[None, 1.0]", "TypeError"), ("[1 / rewards[1], 0]", "ZeroDivision")]
)
def test_a_users_advantage_that_fails_is_a_config_error_that_names_it(tmp_path: Path, given: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(f"def advantage(rewards, valid): return {given}\n")
    config = minimal_config(loss={"advantage": f"{tmp_path / 'mine.py'}:advantage"})
    scheduler: Any = FakeScheduler([group(0, rewards=(1.0, 0.0))])
    with pytest.raises(ConfigError, match=rf"loss\.advantage\.name = .*mine\.py:advantage failed: {says}"):
        RolloutBatches(config, scheduler).take_step(0, StepTimer())


def test_a_group_that_teaches_nothing_counts_nowhere_when_the_config_drops_it() -> None:
    scheduler: Any = FakeScheduler([group(0), group(1, rewards=(0.5, 0.5))])
    config = minimal_config(rollout={"drop_zero_variance": True})
    batch = RolloutBatches(config, scheduler).take_step(6, StepTimer())
    [taught, dropped] = batch.minibatches[0]
    assert (taught.num_trained_tokens, taught.num_sequences, taught.data.valid) == (12, 2, (True, True))
    assert (dropped.num_trained_tokens, dropped.num_sequences, dropped.data.valid) == (0, 0, (False, False))
    assert (batch.metrics["groups/trained"], batch.metrics["groups/dropped_alike"]) == (1.0, 1.0)


def test_a_step_tells_which_groups_it_dropped_and_why() -> None:
    failed = group(1, valid=(False, False), errors=("prompt 1, sympy: gone",))
    masked = group(2, valid=(True, False))
    alike = group(4, rewards=(0.5, 0.5), texts=("a", "b"))
    scheduler: Any = FakeScheduler([group(0), group(5)], [failed, masked, alike])
    batch = RolloutBatches(minimal_config(), scheduler).take_step(6, StepTimer())
    assert [item.data.samples for item in batch.minibatches[0]] == ["samples 0", "samples 5"]
    assert (list(batch.ordinals), batch.dropped, batch.passed_over) == ([0, 1, 2, 3, 4, 5], [1, 2, 4], [3])
    assert [line["advantage"] for line in batch.lines] == [None, None]
    counted = {name: value for name, value in batch.metrics.items() if name.startswith("groups/")}
    assert counted == {
        "groups/sampled": 5.0,
        "groups/trained": 2.0,
        "groups/passed_over": 1.0,
        "groups/dropped_failed": 1.0,
        "groups/dropped_masked": 1.0,
        "groups/dropped_alike": 1.0,
        "groups/alike_reward_mean": 0.5,
    }


@pytest.mark.parametrize("advantage", ["group", "reinforce_pp"])
def test_a_step_whose_groups_are_all_dropped_trains_on_nothing(advantage: str) -> None:
    scheduler: Any = FakeScheduler([], [group(0, rewards=(1.0, 1.0)), group(1, rewards=(0.0, 0.0))])
    config = minimal_config(train={"num_minibatches": 2}, loss={"advantage": advantage})
    batch = RolloutBatches(config, scheduler).take_step(6, StepTimer())
    assert batch.minibatches == [[], []], "each an optimizer step that is skipped: versions count on"
    assert batch.metrics["reward/mean"] == 0.5


def test_long_completions_lose_reward_before_groups_are_compared() -> None:
    # Completions of 4 and 8 tokens, of at most 8: the second ends where the penalty is 1.
    scheduler: Any = FakeScheduler([group(0, rewards=(1.0, 1.0))])
    config = minimal_config(
        rollout={"max_new_tokens": 8, "overlong_tokens": 3}, loss={"advantage": {"normalize_std": False}}
    )
    [[item]] = RolloutBatches(config, scheduler).take_step(6, StepTimer()).minibatches
    assert item.data.advantages == (0.5, -0.5)


def test_an_advantage_of_the_whole_step_sees_all_groups() -> None:
    scheduler: Any = FakeScheduler([group(0, rewards=(1.0, 0.0)), group(1, rewards=(5.0, 2.0))])
    config = minimal_config(loss={"advantage": {"name": "reinforce_pp", "normalize_std": False}})
    items = RolloutBatches(config, scheduler).take_step(6, StepTimer()).minibatches[0]
    assert [item.data.advantages for item in items] == [(-1.0, -2.0), (3.0, 0.0)]


def test_the_groups_of_a_step_are_dealt_out_to_its_minibatches() -> None:
    batch = batches([group(ordinal) for ordinal in range(5)], num_minibatches=2).take_step(5, StepTimer())
    samples = [[data.samples for data in data_of(minibatch)] for minibatch in batch.minibatches]
    assert samples == [["samples 0", "samples 2", "samples 4"], ["samples 1", "samples 3"]]


def test_the_wait_for_rollouts_is_a_phase() -> None:
    timer = StepTimer()
    batches([group(0)]).take_step(5, timer)
    assert "time/generate_wait_s" in timer.finish_step()


def test_a_line_is_kept_for_each_rollout_with_a_text() -> None:
    batch = batches([group(0, texts=("#### 3", "no idea")), group(1)]).take_step(5, StepTimer())
    asked = {"ordinal": 0, "source": "", "prompt": "What is 0?", "answer": "3"}
    common = {**asked, "valid": True, "over_budget": "", "policy_version": 5}
    assert batch.lines == [
        {
            **common,
            "sample": 0,
            "completion": "#### 3",
            "reward": 1.5,
            "rewards": {"correctness": 1.0, "strict_format": 0.5},
            "advantage": 0.5,
            "tokens": 4,
            "truncated": False,
        },
        {
            **common,
            "sample": 1,
            "completion": "no idea",
            "reward": 0.5,
            "rewards": {"correctness": 0.0, "strict_format": 0.5},
            "advantage": -0.5,
            "tokens": 8,
            "truncated": True,
        },
    ]


def test_demonstrations_are_trained_on_in_order_from_the_first_that_no_step_had() -> None:
    stream: Any = FakeDemonstrations()
    source = DemonstrationBatches(
        minimal_config(task={"name": "sft", "args": {"batch_size": 2}}), stream, next_ordinal=4
    )
    first, second = (source.take_step(0, StepTimer()) for _ in range(2))
    assert (list(first.ordinals), list(second.ordinals)) == ([4, 5], [6, 7])
    [items] = first.minibatches
    assert [(item.num_trained_tokens, round(item.cost, 1)) for item in items] == [(2, 7.0), (2, 8.0)]
    assert first.metrics == {"tokens/completion_mean": 2.0, "tokens/completion_total": 4.0}
    sequence = items[0].data
    assert isinstance(sequence, TrainSequence)
    assert sequence.token_ids.tolist() == [5, 5, 5, 5, 5, 7, 8]
    assert sequence.loss_mask.tolist() == [False] * 5 + [True] * 2
    assert sequence.advantages.tolist() == [0.0] * 5 + [1.0] * 2
    assert sequence.engine_logprobs.tolist() == [0.0] * 7


def test_demonstrations_of_a_step_are_dealt_out_to_its_optimizer_steps() -> None:
    stream: Any = FakeDemonstrations()
    config = minimal_config(task={"name": "sft", "args": {"batch_size": 5}}, train={"num_minibatches": 2})
    batch = DemonstrationBatches(config, stream, next_ordinal=0).take_step(0, StepTimer())
    assert [[item.data.ordinal for item in items] for items in batch.minibatches] == [[0, 2, 4], [1, 3]]


def test_a_fixed_share_of_all_completions_tells_the_mismatch_whatever_is_trained_on() -> None:
    left_out = [group(ordinal, valid=(False, False), rewards=(1.0, 1.0)) for ordinal in range(20)]
    scheduler: Any = FakeScheduler(left_out[:4], dropped=left_out[4:])
    batch = RolloutBatches(minimal_config(), scheduler).take_step(6, StepTimer())
    assert sum(item.num_trained_tokens for item in batch.minibatches[0]) == 0
    assert [(each.samples, each.valid) for each in batch.measured] == [
        ("samples 0", (True, False)), ("samples 8", (True, False)), ("samples 16", (True, False))
    ]  # fmt: skip
