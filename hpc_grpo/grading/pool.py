"""The pool of reward workers: grades groups, each reward with a deadline of its own.

Runs in the grader's process, and in the driver to check rewards; many groups may be in flight. Waits for the slowest
reward of the group.

A reward that raises, hangs or dies masks its group and adds an error line; the driver decides whether the run goes on.
One that breaks its contract always stops the run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from hpc_grpo.config import RewardConfig
from hpc_grpo.config.rollout import REWARD_LOAD_S
from hpc_grpo.errors import ConfigError, HpcGrpoError, RewardAwayError, RewardError
from hpc_grpo.grading.slot import QueuedCall, WorkerSlot
from hpc_grpo.grading.worker import Call, CallResult, Preparation
from hpc_grpo.registry import REWARDS
from hpc_grpo.rewards import Group
from hpc_grpo.system.secret import is_secret
from hpc_grpo.system.usage import Usage

_RESUME_S = 600.0
"""More patience with a reward's `prepare` at a resume, which may wait for a server to come back.
No longer for a longer `timeout_s`: `deadlines.start_s` must not end the wait before it says what is away."""

_GRACE_S = 5.0
"""More time for the worker of a built-in than for a completion, whose deadline is the worker's to keep."""


@dataclass(frozen=True)
class RewardOutcome:
    """A graded group; all tuples have one entry per completion.

    `rewards` is the weighted sum of `parts`, which are not weighted. When a reward failed, its part and
    `rewards` are 0.0 and `valid` is False for the whole group; `errors` has one line for each failed reward.
    `over_budget` says of a completion that used up a reward's budget what happened, else "": its part is 0.0.
    """

    rewards: tuple[float, ...]
    parts: Mapping[str, tuple[float, ...]]
    valid: tuple[bool, ...]
    errors: tuple[str, ...]
    over_budget: tuple[str, ...]
    timed_out: bool = False
    """Whether each failed reward met its deadline."""


class RewardPool:
    """Runs the rewards of a config in `num_workers` processes, which start with their first call."""

    def __init__(
        self, rewards: Sequence[RewardConfig], num_workers: int, load_timeout_s: float = REWARD_LOAD_S
    ) -> None:
        [self._rewards] = labelled([rewards])
        for reward in rewards:
            reward.settings()
        self._load_timeout_s = load_timeout_s
        self._queue: SimpleQueue[QueuedCall | None] = SimpleQueue()
        self._closed = False
        names = [_function_name(reward) for reward in rewards]
        environ = _environ_for(rewards)
        self._slots = [WorkerSlot(names, load_timeout_s, self._queue, environ) for _ in range(num_workers)]
        for slot in self._slots:
            slot.start()

    def check(self, *, is_resume: bool = False) -> tuple[str, ...]:
        """Import every reward in a worker and prepare one after the other; return what they say of themselves.

        Raises ConfigError when that fails or does not end in time, RewardAwayError at a resume where what a reward
        asks does not answer.
        """
        notes = []
        for each in self._rewards.values():
            patience_s = self._load_timeout_s + (_RESUME_S if is_resume else 0.0)
            preparation = Preparation(_function_name(each), each.settings() or each.args, each.timeout_s, is_resume)
            result = self._put(preparation, patience_s).result()
            if result.away is not None:
                raise RewardAwayError(result.away)
            if (problem := result.violation or result.failure) is not None:
                raise ConfigError(problem)
            notes += [] if result.note is None else [result.note]
        return tuple(notes)

    def submit(
        self,
        prompt: str,
        completions: Sequence[str],
        fields: Mapping[str, Any],
        rewards: Mapping[str, RewardConfig] | None = None,
    ) -> Future[RewardOutcome]:
        """Grade one group by these rewards of the pool, by their labels; None: by all. By none it gets 0.0.

        The future raises RewardError when a reward breaks its contract.
        """
        rewards = self._rewards if rewards is None else rewards
        group = _Group(rewards, len(completions))
        for label, reward in rewards.items():
            asked = Group(prompt, tuple(completions), fields, reward.timeout_s)
            call = Call(_function_name(reward), reward.settings() or reward.args, asked, reward.completion_s)
            # The worker ends a completion of a built-in itself; its own deadline comes first.
            grace_s = 0.0 if ":" in reward.name else _GRACE_S
            group.expect(label, self._put(call, reward.timeout_s + grace_s))
        if not rewards:
            group.complete()
        return group.outcome

    def usage(self) -> list[Usage | None]:
        """Return what each worker has used since the call before; None in the place of one that does not live."""
        return [slot.usage() for slot in self._slots]

    def close(self) -> None:
        """Kill the workers, whatever they do. Calls not yet over raise HpcGrpoError."""
        self._closed = True
        for slot in self._slots:
            slot.close()
            self._queue.put(None)
        for slot in self._slots:
            slot.join()
        while not self._queue.empty():
            if (queued := self._queue.get()) is not None:
                queued.result.set_exception(HpcGrpoError("The reward pool was closed before the call."))

    def _put(self, call: Call | Preparation, timeout_s: float) -> Future[CallResult]:
        if self._closed:
            raise HpcGrpoError("The reward pool is closed.")
        queued = QueuedCall(call, timeout_s)
        self._queue.put(queued)
        return queued.result


def labelled(reward_sets: Sequence[Sequence[RewardConfig]]) -> list[dict[str, RewardConfig]]:
    """Label the rewards of each set by their names. Another reward of a name gets #2, #3 …

    Rewards of two sets have one label if name and arguments are equal: a label's scores are not weighted.

    >>> easy, hard = RewardConfig(name="a:f"), RewardConfig(name="a:f", args={"level": 3})
    >>> [list(each) for each in labelled([[easy], [hard, easy], [hard, hard]])]
    [['a:f'], ['a:f#2', 'a:f'], ['a:f#2', 'a:f#3']]
    """
    known: dict[str, list[tuple[dict[str, Any], int]]] = {}
    sets = []
    for rewards in reward_sets:
        labels: dict[str, RewardConfig] = {}
        for index, reward in enumerate(rewards):
            of_name = known.setdefault(reward.name, [])
            nth = sum((other.name, other.args) == (reward.name, reward.args) for other in rewards[:index])
            if (reward.args, nth) not in of_name:
                of_name.append((reward.args, nth))
            number = of_name.index((reward.args, nth)) + 1
            labels[reward.name if number == 1 else f"{reward.name}#{number}"] = reward
        sets.append(labels)
    return sets


def _environ_for(rewards: Sequence[RewardConfig]) -> dict[str, str]:
    """Return the variables of a worker: no secret but those that a reward names.

    A proxy's address may hold a password: it reaches the workers of a built-in that asks a server.
    """
    named = {
        name
        for reward in rewards
        for name in (*reward.pass_env, reward.args.get("api_key_env"), reward.args.get("token_env"))
    }
    if any(":" not in reward.name and not REWARDS.find(reward.name).is_one_by_one for reward in rewards):
        named |= {name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")}
    return {name: value for name, value in os.environ.items() if name in named or not is_secret(name, value)}


def _function_name(reward: RewardConfig) -> str:
    """Return the name to find in a worker, where a file's path is absolute: the worker may start elsewhere."""
    module, separator, attribute = reward.name.rpartition(":")
    return f"{Path(module).absolute()}:{attribute}" if separator and module.endswith(".py") else reward.name


class _Group:
    """Collects the results of one group's calls; the last to arrive completes `outcome`."""

    def __init__(self, rewards: Mapping[str, RewardConfig], num_completions: int) -> None:
        self.outcome: Future[RewardOutcome] = Future()
        # From here nobody can cancel it: a result for a cancelled future raises in the slot's thread.
        self.outcome.set_running_or_notify_cancel()
        self._rewards = rewards
        self._num_completions = num_completions
        self._results: dict[str, Future[CallResult]] = {}
        self._lock = threading.Lock()

    def expect(self, label: str, result: Future[CallResult]) -> None:
        result.add_done_callback(lambda done: self._arrived(label, done))

    def _arrived(self, label: str, done: Future[CallResult]) -> None:
        with self._lock:
            self._results[label] = done
            if len(self._results) < len(self._rewards):
                return
        self.complete()

    def complete(self) -> None:
        """Give the outcome, once the result of every reward is there."""
        try:
            outcome = self._combined()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the outcome
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(outcome)

    def _combined(self) -> RewardOutcome:
        """Add up the parts. Raises RewardError when a reward broke its contract, and what its call raised."""
        zeros = (0.0,) * self._num_completions
        parts: dict[str, tuple[float, ...]] = {}
        errors: list[str] = []
        lost = [""] * self._num_completions
        timed_out = True
        for label in self._rewards:
            result = self._results[label].result()
            if result.violation is not None:
                raise RewardError(result.violation)
            if result.failure is not None:
                errors.append(f"reward {label!r}: {result.failure}")
                timed_out &= result.timed_out
            parts[label] = zeros if result.scores is None else result.scores
            for index, reason in result.lost.items():
                lost[index] = f"reward {label!r}: {reason}"
        totals = [
            sum((reward.weight * parts[label][index] for label, reward in self._rewards.items()), start=0.0)
            for index in range(self._num_completions)
        ]
        return RewardOutcome(
            rewards=zeros if errors else tuple(totals),
            parts=parts,
            valid=(not errors,) * self._num_completions,
            errors=tuple(errors),
            over_budget=tuple(lost),
            timed_out=bool(errors) and timed_out,
        )
