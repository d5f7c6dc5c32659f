"""The rollout scheduler: decides when each prompt starts, and which groups a step trains on.

Waits for engines and graders. The loop calls `start_prompts` after each publish.

Prompts start and are taken in the order of their ordinals. So a checkpoint stores only the first ordinal not taken, and
`ahead` with a curriculum. With `max_policy_lag` = k, rollouts of step s may start once the published version is at
least s·M - k (s counts from 0, M is the number of optimizer steps in a step). k = 0 is synchronous. The next
group replaces a dropped group. So a group is trained in its own step or an earlier step, and never exceeds the bound.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.config import Config
from hpc_grpo.data.stream import PromptStream, sampling_seed
from hpc_grpo.errors import HpcGrpoError, PromptError, RewardError
from hpc_grpo.types import GroupGrades, GroupRequest, Prompt, SamplingSpec

if TYPE_CHECKING:
    from hpc_grpo.data.curriculum import Curriculum, Known

_MAX_SHOWN_ERRORS = 3
_WINDOW = 20
"""Failures are counted over at least this many prompts; early in a run, over all prompts until then."""


@dataclass(frozen=True)
class DriverState:
    """The driver's state in a checkpoint: finished steps, first unused ordinal, curriculum, ordinals chosen `ahead`."""

    step: int = 0
    next_ordinal: int = 0
    curriculum: Known = field(default_factory=dict)
    ahead: Sequence[int] = ()


@dataclass(frozen=True)
class GradedGroup:
    """A finished group: `samples` refers to its GroupSamples in the object store."""

    prompt: Prompt
    samples: Any
    grades: GroupGrades


class Pool(Protocol):
    """Samples and grades groups: `RolloutPool`, or a simulated one."""

    def restarts(self) -> dict[str, float]:
        """Return the metrics `engine/restarts` and `grading/restarts`."""

    def start(
        self, prompts: Sequence[Prompt], requests: Sequence[GroupRequest], with_texts: Sequence[bool]
    ) -> Sequence[Any]:
        """Begin to sample. Return a handle for `wait` for each prompt."""

    def wait(self, started: Sequence[Any], waiting_for: str) -> list[GradedGroup]: ...


@dataclass(frozen=True)
class StepGroups:
    """The groups that a step trains on, and the `dropped` groups: all their advantages are 0, so others replaced them.

    `ordinals` are all ordinals of the step, without a gap. The ordinals `passed_over` have no group: the curriculum
    lets their prompts rest.
    """

    ordinals: range
    trained: Sequence[GradedGroup]
    dropped: Sequence[GradedGroup] = ()

    @property
    def sampled(self) -> list[GradedGroup]:
        return sorted([*self.trained, *self.dropped], key=lambda group: group.prompt.ordinal)

    @property
    def passed_over(self) -> list[int]:
        sampled = {group.prompt.ordinal for group in self.sampled}
        return [ordinal for ordinal in self.ordinals if ordinal not in sampled]


class RolloutScheduler:
    """Keeps the engines busy within the lag bound."""

    def __init__(self, config: Config, stream: PromptStream, pool: Pool, state: DriverState, total_steps: int) -> None:
        self._config, self._stream, self.pool = config, stream, pool
        self._algorithm = algorithm_of(config)
        self._sampling = config.rollout.sampling(config.rollout.temperature, config.rollout.top_p)
        self.curriculum: Curriculum | None = None
        if (settings := config.data.curriculum) is not None:
            from hpc_grpo.data.curriculum import Curriculum  # needs numpy, which a simulation does without

            self.curriculum = Curriculum(settings, state.curriculum)
        self._next_step, self._total_steps = state.step, total_steps
        self._started: deque[Any] = deque()
        self._next_to_start = self._next_to_take = state.next_ordinal
        self._chosen = deque(state.ahead)
        self._earlier: deque[GroupGrades] = deque(maxlen=_WINDOW)

    def start_prompts(self, policy_version: int) -> None:
        """Start the prompts of every step that the lag bound allows at this published version."""
        rollout, minibatches = self._config.rollout, self._config.train.num_minibatches
        num_steps = min(self._total_steps, (policy_version + rollout.max_policy_lag) // minibatches + 1)
        self._start((num_steps - self._next_step) * rollout.prompts_per_step - len(self._started), policy_version)

    def take_step(self, policy_version: int) -> StepGroups:
        """Wait for the next step's groups, and start the prompts of later steps that the lag bound allows.

        Returns fewer groups than usual if `rollout.dynamic_sampling` reaches its limit, or if all other prompts rest
        forever. Raises RewardError if too many rewards failed, HpcGrpoError for a rollout beyond the lag bound, and
        PromptError if all prompts rest forever.
        """
        rollout = self._config.rollout
        most = rollout.prompts_per_step * (rollout.dynamic_sampling or 1)
        trained: list[GradedGroup] = []
        dropped: list[GradedGroup] = []
        while missing := min(rollout.prompts_per_step, most - len(dropped)) - len(trained):
            # Prompts that are not started yet are sampled with the current weights.
            self._start(missing - len(self._started), policy_version)
            started = [self._started.popleft() for _ in range(min(missing, len(self._started)))]
            if not started:
                break
            groups = self.pool.wait(started, "rollouts")
            for group in groups:
                is_kept = not rollout.dynamic_sampling or self._algorithm.teaches(group.grades)
                (trained if is_kept else dropped).append(group)
            graded = [each.grades for each in (*trained, *dropped)]
            check_failures(graded, self._config.grading.max_failed_fraction, list(self._earlier))
            versions = [own for group in groups for own in group.grades.min_policy_versions if own >= 0]
            oldest = min(versions, default=policy_version)
            if policy_version - oldest > rollout.max_policy_lag:
                raise HpcGrpoError(
                    f"A rollout of policy version {oldest} reached the learner at version {policy_version}, beyond "
                    f"rollout.max_policy_lag = {rollout.max_policy_lag}."
                )
        if not (trained or dropped):
            raise PromptError(
                f"All {self._stream.num_items} prompts rest forever after step {self._next_step} (data.curriculum). To "
                f"complete the run now, set train.total_steps={self._next_step} and the other lengths to null. "
                f"Otherwise start a run with more prompts, or with a rest that ends."
            )
        last = max(group.prompt.ordinal for group in (*trained, *dropped))
        step = StepGroups(range(self._next_to_take, last + 1), trained, dropped)
        self._next_to_take = step.ordinals.stop
        self._next_step += 1
        for group in step.sampled:
            self._earlier.append(group.grades)
            if self.curriculum is not None:
                self.curriculum.note(self._stream.place(group.prompt.ordinal), group.grades)
        self.start_prompts(policy_version)  # replaces the prompts that this step took from later steps
        return step

    @property
    def ahead(self) -> list[int]:
        """The ordinals that the curriculum chose in advance and no step has taken; [] without a curriculum.

        A checkpoint stores them: after a resume the curriculum knows more grades and would choose other ordinals.
        """
        if self.curriculum is None:
            return []
        return [*(group.prompt.ordinal for group in self._started), *self._chosen]

    def _start(self, count: int, policy_version: int) -> None:
        """Start the next `count` prompts, or fewer if all others rest forever. The pool gets one step's at a time."""
        rollout = self._config.rollout
        while count > 0:
            prompts: list[Prompt] = []
            while len(prompts) < min(count, rollout.prompts_per_step) and (ordinal := self._choose()) is not None:
                prompts.append(self._stream.prompt(ordinal))
                self._next_to_start = ordinal + 1
            if not prompts:
                return
            seed, size = self._config.run.seed, rollout.group_size
            requests = [request_of(prompt, seed, size, self._sampling, policy_version) for prompt in prompts]
            num_logged = round(rollout.logged_fraction * len(prompts))
            with_texts = [position < num_logged for position in range(len(prompts))]
            self._started += self.pool.start(prompts, requests, with_texts)
            count -= len(prompts)

    def _choose(self) -> int | None:
        """Return the next ordinal to start; None if each of the other prompts rests forever."""
        if self._chosen:
            return self._chosen.popleft()
        if self.curriculum is None:
            return self._next_to_start
        return self.curriculum.next_awake(self._stream, self._next_to_start)


def request_of(
    prompt: Prompt, seed: int, num_samples: int, sampling: SamplingSpec, version: int, *, is_urgent: bool = False
) -> GroupRequest:
    """Return the request of a prompt, with a seed for each sample.

    A sample's seed depends on `seed`, the prompt's ordinal, the sample's index and the `version` of the weights. An
    environment's seed depends on `seed` and the ordinal.
    """
    seeds = tuple(sampling_seed(seed, prompt.ordinal, index, version) for index in range(num_samples))
    request = GroupRequest(prompt.ordinal, prompt.token_ids, seeds, sampling, is_urgent, prompt.images)
    if prompt.environment is None:
        return request
    scene_seed = sampling_seed(seed, prompt.ordinal, -1, 0)
    return replace(request, environment=prompt.environment, row=prompt.fields, environment_seed=scene_seed)


def check_failures(
    grades: Sequence[GroupGrades], max_failed_fraction: float, earlier: Sequence[GroupGrades] | None = None
) -> None:
    """Raise RewardError with the errors of rewards and environments if more groups failed than allowed.

    A group counts as one failure if a reward failed, otherwise as the share of its rollouts whose environment failed.
    At least one failure is allowed, because one of a few groups proves little. A fraction of 0 allows none.

    Training passes `earlier` groups: the last of them complete a window of 20 groups. In training, a missed deadline
    counts only if every group has a late or failed call: a server may be slow. An eval set passes None, and every
    failure counts: the metrics would leave out the failed prompts.
    """
    forgives_deadlines = earlier is not None and max_failed_fraction > 0
    missing = max(0, _WINDOW - len(grades))
    judged = [*(earlier[-missing:] if earlier and missing else ()), *grades]
    allowed = max(1.0, max_failed_fraction * len(judged)) if max_failed_fraction else 0.0
    shares = [1.0 - sum(group.is_scored) / len(group.rewards) for group in judged]
    broken = shares
    if forgives_deadlines and not all(group.errors for group in judged):
        broken = [0.0 if group.timed_out else own for group, own in zip(judged, shares, strict=True)]
    if sum(broken) > allowed:
        failures = [f"prompt {own.ordinal}, environment: {text}" for own in judged for text in own.failures if text]
        errors = [error for group in judged for error in group.errors]
        shown = "\n  ".join([*errors, *failures][-_MAX_SHOWN_ERRORS:])
        what = " or the ".join(["reward"] * bool(errors) + ["environment"] * bool(failures))
        raise RewardError(
            f"The {what} failed for {sum(shares):.3g} of {len(judged)} prompts, more than "
            f"grading.max_failed_fraction = {max_failed_fraction:g} allows:\n  {shown}"
        )


def spread(count: int, loads: Sequence[int]) -> list[int]:
    """Return an engine's index for each of `count` groups: the engine with the shortest queue, the first of equals.

    >>> spread(4, [0, 0, 0]), spread(4, [3, 0, 1])
    ([0, 1, 2, 0], [1, 1, 2, 1])
    """
    fewest = [(load, index) for index, load in enumerate(loads)]
    heapq.heapify(fewest)
    chosen = []
    for _ in range(count):
        load, index = fewest[0]
        heapq.heapreplace(fewest, (load + 1, index))
        chosen.append(index)
    return chosen
