"""The rollout scheduler: which prompt starts when, and which groups a step trains on.

Waits for engines and graders; unblocked by `start_prompts` after a publish.

A prompt's step is fixed by its ordinal (`ordinal // prompts_per_step`), so the lag bound is a rule on when its step
may start, and what a checkpoint must remember is one number. With `max_policy_lag` = k, rollouts of step s may
start once the published version is at least s·M - k (M optimizer steps a step): k = 0 is strictly on-policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpc_grpo.config import Config
from hpc_grpo.data.seeds import sampling_seed
from hpc_grpo.data.stream import PromptStream
from hpc_grpo.driver.sampling import GradedGroup, RolloutPool, StartedGroup
from hpc_grpo.errors import HpcGrpoError, RewardError
from hpc_grpo.types import GroupGrades, GroupRequest, Prompt, SamplingSpec

_MAX_SHOWN_ERRORS = 3


class RolloutScheduler:
    """Keeps the engines busy within the lag bound."""

    def __init__(
        self, config: Config, stream: PromptStream, pool: RolloutPool, next_step: int, total_steps: int
    ) -> None:
        self._config = config
        self._stream = stream
        self._pool = pool
        self._next_to_start = next_step
        self._next_to_take = next_step
        self._total_steps = total_steps
        self._started: dict[int, list[StartedGroup]] = {}

    def start_prompts(self, policy_version: int) -> None:
        """Start the prompts of every step that the lag bound allows at this published version."""
        minibatches, max_lag = self._config.train.num_minibatches, self._config.rollout.max_policy_lag
        while self._next_to_start < self._total_steps and self._next_to_start * minibatches - policy_version <= max_lag:
            self._started[self._next_to_start] = self._start_step(self._next_to_start, policy_version)
            self._next_to_start += 1

    def take_step(self, policy_version: int) -> list[GradedGroup]:
        """Wait for the next step's groups. Raises RewardError for failed rewards, HpcGrpoError beyond the lag bound."""
        started = self._started.pop(self._next_to_take)
        self._next_to_take += 1
        groups = self._pool.wait(started, "rollouts")
        check_failures([group.grades for group in groups], self._config.grading.max_failed_fraction)
        oldest = min(min(group.grades.min_policy_versions) for group in groups)
        if policy_version - oldest > self._config.rollout.max_policy_lag:
            raise HpcGrpoError(
                f"A rollout of policy version {oldest} reached the learner at version {policy_version}, beyond "
                f"rollout.max_policy_lag = {self._config.rollout.max_policy_lag}."
            )
        return groups

    @property
    def num_engine_restarts(self) -> int:
        return self._pool.num_engine_restarts

    @property
    def num_grader_restarts(self) -> int:
        return self._pool.num_grader_restarts

    def _start_step(self, step: int, policy_version: int) -> list[StartedGroup]:
        size = self._config.rollout.prompts_per_step
        prompts = [self._stream.prompt(ordinal) for ordinal in range(step * size, (step + 1) * size)]
        requests = [self._request(prompt, policy_version) for prompt in prompts]
        num_logged = round(self._config.rollout.logged_fraction * size)
        return self._pool.start(prompts, requests, [position < num_logged for position in range(size)])

    def _request(self, prompt: Prompt, policy_version: int) -> GroupRequest:
        rollout, seed = self._config.rollout, self._config.run.seed
        samples = range(rollout.group_size)
        seeds = tuple(sampling_seed(seed, prompt.ordinal, index, policy_version) for index in samples)
        sampling = SamplingSpec(rollout.max_new_tokens, rollout.min_new_tokens, rollout.temperature, rollout.top_p)
        return GroupRequest(prompt.ordinal, prompt.token_ids, seeds, sampling)


def check_failures(grades: Sequence[GroupGrades], max_failed_fraction: float) -> None:
    """Raise RewardError with the rewards' own errors when more groups failed than allowed."""
    errors = [error for group in grades for error in group.errors]
    num_failed = sum(bool(group.errors) for group in grades)
    if num_failed > max_failed_fraction * len(grades):
        shown = "\n  ".join(errors[:_MAX_SHOWN_ERRORS])
        raise RewardError(
            f"The reward failed for {num_failed} of {len(grades)} prompts, more than "
            f"grading.max_failed_fraction = {max_failed_fraction:g} allows:\n  {shown}"
        )
