from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_grpo.config import Config
from hpc_grpo.driver.rollouts import DriverState, GradedGroup, RolloutScheduler, StepGroups, check_failures
from hpc_grpo.errors import HpcGrpoError, RewardError
from hpc_grpo.types import GroupGrades, GroupRequest, Prompt
from tests.support.configs import minimal_config
from tests.support.sequences import graded

PROMPTS_PER_STEP = 3
TOTAL_STEPS = 6


def make_config(**sections: dict[str, Any]) -> Config:
    rollout = {"prompts_per_step": PROMPTS_PER_STEP, "group_size": 2}
    defaults = {"run": {"seed": 7}, "rollout": rollout, "train": {"total_steps": TOTAL_STEPS}}
    return minimal_config(defaults, **sections)


def make_grades(
    ordinal: int, version: int = 0, errors: tuple[str, ...] = (), rewards: tuple[float, float] = (1.0, 0.0)
) -> GroupGrades:
    versions = {"min_policy_versions": (version,) * 2, "mean_policy_versions": (float(version),) * 2}
    parts, valid = {"correctness": (1.0, 0.0)}, (True, not errors)
    return graded(*rewards, ordinal=ordinal, reward_parts=parts, valid=valid, errors=errors, **versions)


class FakeStream:
    def prompt(self, ordinal: int) -> Prompt:
        return Prompt(ordinal, 0, (ordinal,), f"prompt {ordinal}", {})


class FakePool:
    """Finishes every group with the newest version that was published when it was started."""

    def __init__(self) -> None:
        self.published = 0
        self.started: list[int] = []
        self.requests: dict[int, GroupRequest] = {}
        self.with_texts: dict[int, bool] = {}
        self.errors: dict[int, tuple[str, ...]] = {}
        self.rewards: dict[int, tuple[float, float]] = {}
        self.calls: list[list[int]] = []

    def start(self, prompts: Sequence[Prompt], requests: Sequence[GroupRequest], with_texts: Sequence[bool]) -> Any:
        self.calls.append([prompt.ordinal for prompt in prompts])
        self.started += self.calls[-1]
        self.requests |= {request.ordinal: request for request in requests}
        self.with_texts |= {prompt.ordinal: flag for prompt, flag in zip(prompts, with_texts, strict=True)}
        return [SimpleNamespace(prompt=prompt, version=self.published) for prompt in prompts]

    def wait(self, started: Sequence[Any], waiting_for: str) -> list[GradedGroup]:
        assert waiting_for == "rollouts"
        return [
            GradedGroup(
                group.prompt,
                None,
                make_grades(
                    group.prompt.ordinal,
                    group.version,
                    self.errors.get(group.prompt.ordinal, ()),
                    self.rewards.get(group.prompt.ordinal, (1.0, 0.0)),
                ),
            )
            for group in started
        ]


def run_loop(config: Config, next_step: int = 0) -> tuple[FakePool, list[list[int]], list[int], list[int]]:
    """Train as the driver does. Per step: ordinals trained, the lag consumed, and steps started but not taken."""
    pool, minibatches = FakePool(), config.train.num_minibatches
    state = DriverState(next_step, next_step * PROMPTS_PER_STEP)
    scheduler = RolloutScheduler(config, FakeStream(), pool, state, TOTAL_STEPS)  # type: ignore[arg-type]
    trained, lags, ahead = [], [], []
    pool.published = next_step * minibatches
    scheduler.start_prompts(pool.published)
    for step in range(next_step, TOTAL_STEPS):
        started_steps = len(pool.started) // PROMPTS_PER_STEP + next_step
        ahead.append(started_steps - step - 1)
        groups = scheduler.take_step(pool.published).trained
        trained.append([group.prompt.ordinal for group in groups])
        lags.append(pool.published - min(min(group.grades.min_policy_versions) for group in groups))
        pool.published += minibatches
        scheduler.start_prompts(pool.published)
    return pool, trained, lags, ahead


@pytest.mark.parametrize(
    ("max_lag", "minibatches", "lags", "ahead"),
    [
        (0, 1, [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]),
        (2, 1, [0, 1, 2, 2, 2, 2], [2, 2, 2, 2, 1, 0]),
        (2, 2, [0, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 0]),
        (0, 2, [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]),
    ],
)
def test_engines_run_ahead_as_far_as_the_lag_bound_allows(
    max_lag: int, minibatches: int, lags: list[int], ahead: list[int]
) -> None:
    config = make_config(rollout={"max_policy_lag": max_lag}, train={"num_minibatches": minibatches})
    _, trained, seen_lags, seen_ahead = run_loop(config)
    assert seen_lags == lags
    assert seen_ahead == ahead
    assert trained == [list(range(3 * step, 3 * step + 3)) for step in range(TOTAL_STEPS)]


@pytest.mark.parametrize("max_lag", [0, 2])
def test_every_ordinal_is_started_once_and_none_beyond_the_end(max_lag: int) -> None:
    pool, _, _, _ = run_loop(make_config(rollout={"max_policy_lag": max_lag}))
    assert pool.started == list(range(PROMPTS_PER_STEP * TOTAL_STEPS))


@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_resumed_run_goes_on_with_the_first_ordinal_not_trained_on(max_lag: int) -> None:
    config = make_config(rollout={"max_policy_lag": max_lag})
    _, whole, _, _ = run_loop(config)
    resumed_pool, rest, lags, _ = run_loop(config, next_step=4)
    assert rest == whole[4:]
    assert resumed_pool.started[0] == 4 * PROMPTS_PER_STEP
    assert max(lags) <= max_lag


def test_sampling_seeds_follow_from_ordinal_sample_and_version() -> None:
    config = make_config()
    whole, _, _, _ = run_loop(config)
    resumed, _, _, _ = run_loop(config, next_step=3)
    assert all(resumed.requests[ordinal] == whole.requests[ordinal] for ordinal in resumed.started)
    seeds = [seed for request in whole.requests.values() for seed in request.seeds]
    assert len(set(seeds)) == len(seeds) == TOTAL_STEPS * PROMPTS_PER_STEP * 2
    other, _, _, _ = run_loop(make_config(run={"seed": 8}))
    assert all(other.requests[ordinal].seeds != whole.requests[ordinal].seeds for ordinal in whole.started)


def test_a_request_carries_the_sampling_settings() -> None:
    rollout = {"max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.7, "top_p": 0.9, "group_size": 5}
    pool, _, _, _ = run_loop(make_config(rollout=rollout))
    request = pool.requests[4]
    spec = request.sampling
    assert (spec.max_new_tokens, spec.min_new_tokens, spec.temperature, spec.top_p) == (9, 2, 0.7, 0.9)
    assert request.prompt_token_ids == (4,)
    assert len(request.seeds) == 5


@pytest.mark.parametrize(("fraction", "logged"), [(0.0, 0), (0.3, 1), (1.0, 3)])
def test_texts_are_kept_for_the_logged_fraction(fraction: float, logged: int) -> None:
    pool, _, _, _ = run_loop(make_config(rollout={"logged_fraction": fraction}))
    assert sum(pool.with_texts.values()) == logged * TOTAL_STEPS


def test_a_rollout_beyond_the_lag_bound_stops_the_run() -> None:
    config = make_config(rollout={"max_policy_lag": 1})
    pool = FakePool()
    scheduler = RolloutScheduler(config, FakeStream(), pool, DriverState(), TOTAL_STEPS)  # type: ignore[arg-type]
    scheduler.start_prompts(0)
    with pytest.raises(HpcGrpoError, match=r"version 0 reached the learner at version 2, .*max_policy_lag = 1"):
        scheduler.take_step(2)


def test_rewards_that_fail_too_often_stop_the_run_with_their_own_error() -> None:
    config = make_config(grading={"max_failed_fraction": 0.5})
    pool = FakePool()
    pool.errors = {0: ("prompt 0, sympy: ZeroDivisionError",), 1: ("prompt 1, sympy: timed out",)}
    scheduler = RolloutScheduler(config, FakeStream(), pool, DriverState(), TOTAL_STEPS)  # type: ignore[arg-type]
    scheduler.start_prompts(0)
    with pytest.raises(RewardError) as caught:
        scheduler.take_step(0)
    assert "failed for 2 of 3 prompts" in str(caught.value)
    assert "prompt 0, sympy: ZeroDivisionError" in str(caught.value)


def test_as_many_failures_as_allowed_pass() -> None:
    grades = [make_grades(0, errors=("broke",)), make_grades(1, errors=("broke",)), make_grades(2), make_grades(3)]
    check_failures(grades, 0.5)
    with pytest.raises(RewardError, match=r"grading\.max_failed_fraction = 0\.4"):
        check_failures(grades, 0.4)
    with pytest.raises(RewardError):
        check_failures(grades[1:], 0.0)
    check_failures(grades[2:], 0.0)


def test_one_failed_group_of_few_ends_no_run_and_one_in_each_step_does() -> None:
    config = make_config(grading={"max_failed_fraction": 0.1})
    pool = FakePool()
    pool.errors = {0: ("prompt 0, sympy: gone",)}
    scheduler = RolloutScheduler(config, FakeStream(), pool, DriverState(), TOTAL_STEPS)  # type: ignore[arg-type]
    scheduler.start_prompts(0)
    scheduler.take_step(0)
    pool.errors = {4: ("prompt 4, sympy: gone",)}
    scheduler.start_prompts(1)
    with pytest.raises(RewardError, match="failed for 2 of 6 prompts"):
        scheduler.take_step(1)


def test_a_failure_is_forgotten_after_twenty_prompts() -> None:
    broken, fine = [make_grades(0, errors=("broke",))], [make_grades(ordinal) for ordinal in range(19)]
    check_failures(broken, 0.05, [*broken, *fine])
    with pytest.raises(RewardError, match="failed for 2 of 20 prompts"):
        check_failures(broken, 0.05, [*broken, *fine[1:]])


def test_deadlines_that_were_met_end_a_run_once_every_prompt_failed() -> None:
    slow = [replace(make_grades(ordinal, errors=("did not return",)), timed_out=True) for ordinal in range(4)]
    check_failures(slow, 0.1, [make_grades(9)])
    check_failures([*slow, make_grades(9, errors=("broke",))], 0.1, [make_grades(9)])
    with pytest.raises(RewardError, match="failed for 4 of 4 prompts"):
        check_failures(slow, 0.1, [])


def test_a_group_counts_by_the_share_of_its_rollouts_whose_environment_failed() -> None:
    half = [replace(make_grades(ordinal), failures=("", f"step raised {ordinal}")) for ordinal in range(4)]
    check_failures(half, 0.5)
    with pytest.raises(
        RewardError, match=r"The environment failed for 2 of 4 [^$]*\n  prompt 3, environment: step raised 3"
    ):
        check_failures(half, 0.4)
    with pytest.raises(RewardError, match=r"The reward or the environment failed for 1\.5 of 2 prompts"):
        check_failures([half[0], make_grades(9, errors=("broke",))], 0.5)


def test_a_rollout_whose_environment_failed_before_a_token_was_sampled_is_of_no_version() -> None:
    pool = FakePool()
    pool.published = -1
    scheduler = RolloutScheduler(make_config(), FakeStream(), pool, DriverState(), TOTAL_STEPS)  # type: ignore[arg-type]
    assert len(scheduler.take_step(3).trained) == PROMPTS_PER_STEP


def test_missed_deadlines_count_in_eval_sets_and_where_none_may_fail() -> None:
    slow = [replace(make_grades(ordinal, errors=("did not return",)), timed_out=True) for ordinal in range(3)]
    with pytest.raises(RewardError, match="failed for 3 of 4 prompts"):
        check_failures([*slow, make_grades(9)], 0.1)
    with pytest.raises(RewardError, match="failed for 1 of 2 prompts"):
        check_failures(slow[:1], 0.0, [make_grades(9)])


SOLVED, HOPELESS = (1.0, 1.0), (0.0, 0.0)


def filled_step(pool: FakePool, **rollout: Any) -> tuple[RolloutScheduler, StepGroups]:
    """The first step of a run that fills its steps, with what `pool` says of its prompts."""
    config = make_config(rollout={"dynamic_sampling": 3, **rollout}, grading={"max_failed_fraction": 0.5})
    scheduler = RolloutScheduler(config, FakeStream(), pool, DriverState(), TOTAL_STEPS)  # type: ignore[arg-type]
    scheduler.start_prompts(0)
    return scheduler, scheduler.take_step(0)


def ordinals(groups: Sequence[GradedGroup]) -> list[int]:
    return [group.prompt.ordinal for group in groups]


def test_groups_that_teach_nothing_are_replaced_by_the_next_prompts() -> None:
    pool = FakePool()
    pool.rewards = {0: SOLVED, 2: HOPELESS, 3: SOLVED}
    pool.errors = {4: ("prompt 4, sympy: gone",)}
    scheduler, step = filled_step(pool)
    assert pool.calls == [[0, 1, 2], [3, 4], [5, 6]], "as many more as are missing, each time"
    assert (ordinals(step.trained), ordinals(step.dropped)) == ([1, 5, 6], [0, 2, 3, 4])
    assert step.ordinals == range(7)
    pool.published = 1
    scheduler.start_prompts(1)
    assert pool.calls[3:] == [[7, 8, 9]], "the next step begins where this one ended"


def test_a_step_is_filled_up_to_its_bound_and_trains_on_what_there_is() -> None:
    pool = FakePool()
    pool.rewards = {ordinal: SOLVED for ordinal in range(100) if ordinal != 4}
    _, step = filled_step(pool)
    assert (ordinals(step.trained), step.ordinals) == ([4], range(9))


def test_without_dynamic_sampling_nothing_is_replaced() -> None:
    pool = FakePool()
    pool.rewards = {1: SOLVED}
    _, step = filled_step(pool, dynamic_sampling=None)
    assert (ordinals(step.trained), step.dropped, pool.started) == ([0, 1, 2], [], [0, 1, 2])


def test_engines_that_are_ahead_have_the_next_groups_already_and_are_given_more() -> None:
    pool = FakePool()
    pool.rewards = {0: SOLVED, 1: HOPELESS}
    _, step = filled_step(pool, max_policy_lag=1)
    assert pool.calls == [[0, 1, 2], [3, 4, 5], [6, 7]], "two steps ahead, and what was taken from the second at once"
    assert (ordinals(step.trained), step.ordinals) == ([2, 3, 4], range(5))


def test_rewards_that_fail_too_often_stop_a_step_that_would_be_filled() -> None:
    pool = FakePool()
    pool.errors = {0: ("prompt 0, sympy: gone",), 1: ("prompt 1, sympy: gone",)}
    with pytest.raises(RewardError, match="failed for 2 of 3 prompts"):
        filled_step(pool)
