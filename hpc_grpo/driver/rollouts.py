"""The rollout scheduler: which prompt starts when, and which groups a step trains on.

Waits for engines and graders; unblocked by `start_prompts` after a publish.

Prompts start in the order of their ordinals and are taken in that order, so what a checkpoint must remember of them is
the first ordinal not taken. With `max_policy_lag` = k, rollouts of step s may start once the published version is at
least s·M - k (M optimizer steps a step): k = 0 is strictly on-policy. A group that is dropped has the next one take its
place, so a group is taken for the step that it was started for, or for an earlier one: never older than the bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.config import Config
from hpc_grpo.data.curriculum import Curriculum
from hpc_grpo.data.order import sampling_seed
from hpc_grpo.data.stream import PromptStream
from hpc_grpo.driver.sampling import GradedGroup, RolloutPool, StartedGroup
from hpc_grpo.errors import HpcGrpoError, PromptError, RewardError
from hpc_grpo.types import GroupGrades, GroupRequest, Prompt

if TYPE_CHECKING:
    from hpc_grpo.driver.checkpoints import DriverState

_MAX_SHOWN_ERRORS = 3
_WINDOW = 20
"""Prompts that failures are counted over, at least, where a run has had so many."""

_ALL_RETIRED = (
    "Each of the {num} prompts rests for ever after step {step} (data.curriculum). To complete the run as it is, set "
    "train.total_steps={step} and the other lengths to null; else start one with more prompts, or a rest that ends."
)


@dataclass(frozen=True)
class StepGroups:
    """Holds the groups that a step trains on, and those that taught nothing and were replaced.

    `ordinals` are all that the step used, without a gap; those `passed_over` have no group, their prompts rest.
    """

    ordinals: range
    trained: Sequence[GradedGroup]
    dropped: Sequence[GradedGroup] = ()

    @property
    def sampled(self) -> list[GradedGroup]:
        return sorted([*self.trained, *self.dropped], key=lambda group: group.prompt.ordinal)

    @property
    def passed_over(self) -> list[int]:
        sampled = {group.prompt.ordinal for group in (*self.trained, *self.dropped)}
        return [ordinal for ordinal in self.ordinals if ordinal not in sampled]


class RolloutScheduler:
    """Keeps the engines busy within the lag bound."""

    def __init__(
        self, config: Config, stream: PromptStream, pool: RolloutPool, state: DriverState, total_steps: int
    ) -> None:
        self._config = config
        self._stream = stream
        self._pool = pool
        self._algorithm = algorithm_of(config)
        settings = config.data.curriculum
        self.curriculum = Curriculum(settings, state.curriculum) if settings is not None else None
        self._next_step = state.step
        self._total_steps = total_steps
        self._started: deque[StartedGroup] = deque()
        self._next_to_start = self._next_to_take = state.next_ordinal
        self._chosen = deque(state.ahead)
        self._earlier: deque[GroupGrades] = deque(maxlen=_WINDOW)

    def start_prompts(self, policy_version: int) -> None:
        """Start the prompts of every step that the lag bound allows at this published version."""
        rollout, minibatches = self._config.rollout, self._config.train.num_minibatches
        num_steps = min(self._total_steps, (policy_version + rollout.max_policy_lag) // minibatches + 1)
        self._start((num_steps - self._next_step) * rollout.prompts_per_step - len(self._started), policy_version)

    def take_step(self, policy_version: int) -> StepGroups:
        """Wait for the next step's groups, fewer where `rollout.dynamic_sampling` ends the search for more.

        Raises RewardError for failed rewards, HpcGrpoError beyond the lag bound, PromptError where all prompts rest.
        """
        rollout = self._config.rollout
        most = rollout.prompts_per_step * (rollout.dynamic_sampling or 1)
        trained: list[GradedGroup] = []
        dropped: list[GradedGroup] = []
        while missing := min(rollout.prompts_per_step, most - len(dropped)) - len(trained):
            groups = self._take(missing, policy_version)
            if not groups:
                break
            for group in groups:
                is_kept = not rollout.dynamic_sampling or self._algorithm.teaches(group.grades)
                (trained if is_kept else dropped).append(group)
            graded = [each.grades for each in (*trained, *dropped)]
            check_failures(graded, self._config.grading.max_failed_fraction, list(self._earlier))
            self._check_lag(groups, policy_version)
        if not (trained or dropped):
            raise PromptError(_ALL_RETIRED.format(num=self._stream.num_items, step=self._next_step))
        last = max(group.prompt.ordinal for group in (*trained, *dropped))
        step = StepGroups(range(self._next_to_take, last + 1), trained, dropped)
        self._finish(step, policy_version)
        return step

    @property
    def ahead(self) -> list[int]:
        """List the ordinals that are chosen and that no step has taken, where a curriculum chooses.

        It knew less then than it will after a resume, which has to choose the same.
        """
        if self.curriculum is None:
            return []
        return [*(group.prompt.ordinal for group in self._started), *self._chosen]

    @property
    def num_engine_restarts(self) -> int:
        return self._pool.num_engine_restarts

    @property
    def num_grader_restarts(self) -> int:
        return self._pool.num_grader_restarts

    def _start(self, count: int, policy_version: int) -> None:
        """Start the next prompts, a step's at most in one call; fewer where each of the others rests for ever."""
        rollout = self._config.rollout
        while count > 0:
            prompts = self._next_prompts(min(count, rollout.prompts_per_step))
            if not prompts:
                return
            requests = [self._request(prompt, policy_version) for prompt in prompts]
            num_logged = round(rollout.logged_fraction * len(prompts))
            with_texts = [position < num_logged for position in range(len(prompts))]
            self._started += self._pool.start(prompts, requests, with_texts)
            count -= len(prompts)

    def _next_prompts(self, count: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        while len(prompts) < count and (ordinal := self._choose()) is not None:
            prompts.append(self._stream.prompt(ordinal))
            self._next_to_start = ordinal + 1
        return prompts

    def _choose(self) -> int | None:
        """Return the next ordinal to start; None where each of the other prompts rests for ever."""
        if self._chosen:
            return self._chosen.popleft()
        if self.curriculum is None:
            return self._next_to_start
        return self.curriculum.next_awake(self._stream, self._next_to_start)

    def _take(self, count: int, policy_version: int) -> list[GradedGroup]:
        """Wait for the next groups; those not started yet are sampled with the weights of now."""
        self._start(count - len(self._started), policy_version)
        started = [self._started.popleft() for _ in range(min(count, len(self._started)))]
        return self._pool.wait(started, "rollouts") if started else []

    def _check_lag(self, groups: Sequence[GradedGroup], policy_version: int) -> None:
        oldest = min(min(group.grades.min_policy_versions) for group in groups)
        if policy_version - oldest > self._config.rollout.max_policy_lag:
            raise HpcGrpoError(
                f"A rollout of policy version {oldest} reached the learner at version {policy_version}, beyond "
                f"rollout.max_policy_lag = {self._config.rollout.max_policy_lag}."
            )

    def _finish(self, step: StepGroups, policy_version: int) -> None:
        """Note what the step's prompts were, and start as many as it took from later steps."""
        self._next_to_take = step.ordinals.stop
        self._next_step += 1
        self._earlier += [group.grades for group in step.sampled]
        if self.curriculum is not None:
            for group in step.sampled:
                self.curriculum.note(self._stream.place(group.prompt.ordinal), group.grades)
        self.start_prompts(policy_version)

    def _request(self, prompt: Prompt, policy_version: int) -> GroupRequest:
        rollout, seed = self._config.rollout, self._config.run.seed
        samples = range(rollout.group_size)
        seeds = tuple(sampling_seed(seed, prompt.ordinal, index, policy_version) for index in samples)
        sampling = rollout.sampling(rollout.temperature, rollout.top_p)
        return GroupRequest(prompt.ordinal, prompt.token_ids, seeds, sampling)


def check_failures(
    grades: Sequence[GroupGrades], max_failed_fraction: float, earlier: Sequence[GroupGrades] = ()
) -> None:
    """Raise RewardError with the rewards' own errors when more groups failed than allowed.

    Fewer groups than `_WINDOW` are judged together with the last of the `earlier` ones, and one failure is allowed: one
    of four says little. A deadline that was met says that a server is slow, not that the reward is broken: it counts
    once every group failed.
    """
    missing = max(0, _WINDOW - len(grades))
    judged = [*(earlier[-missing:] if missing else ()), *grades]
    failed = [group for group in judged if group.errors]
    allowed = max(1.0, max_failed_fraction * len(judged)) if max_failed_fraction else 0.0
    num_broken = len(failed) if len(failed) == len(judged) else sum(not group.timed_out for group in failed)
    if num_broken > allowed:
        shown = "\n  ".join([error for group in failed for error in group.errors][-_MAX_SHOWN_ERRORS:])
        raise RewardError(
            f"The reward failed for {len(failed)} of {len(judged)} prompts, more than "
            f"grading.max_failed_fraction = {max_failed_fraction:g} allows:\n  {shown}"
        )
