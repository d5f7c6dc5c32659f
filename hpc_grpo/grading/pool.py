"""The pool of reward workers: grades groups, each reward with a deadline of its own.

Runs in the grader's process, and in the driver to check rewards; many groups may be in flight. Waits for the slowest
reward of the group.

A reward that raises, hangs or dies masks its group and adds an error line; the driver decides whether the run goes on.
One that breaks its contract always stops the run.
"""

from __future__ import annotations

import asyncio
import os
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
"""More patience with a reward's `prepare` at a resume, which may wait for a server to come back (rewards/http.py).
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
    ) -> PendingGroup:
        """Grade one group by these rewards of the pool, by their labels; None: by all. By none it gets 0.0."""
        rewards = self._rewards if rewards is None else rewards
        calls = {}
        for label, reward in rewards.items():
            asked = Group(prompt, tuple(completions), fields, reward.timeout_s)
            call = Call(_function_name(reward), reward.settings() or reward.args, asked, reward.completion_s)
            # The worker ends a completion of a built-in itself; its own deadline comes first.
            grace_s = 0.0 if ":" in reward.name else _GRACE_S
            calls[label] = self._put(call, reward.timeout_s + grace_s)
        return PendingGroup(rewards, len(completions), calls)

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
        queued.result.set_running_or_notify_cancel()  # else who waits could cancel it, and its result would raise
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


@dataclass(frozen=True)
class PendingGroup:
    """A group whose rewards are being computed: `calls` has that of each reward, by its label."""

    rewards: Mapping[str, RewardConfig]
    num_completions: int
    calls: Mapping[str, Future[CallResult]]

    async def wait(self) -> RewardOutcome:
        """Return the outcome once every reward has answered, without a thread. Raises what `result` raises."""
        await asyncio.gather(*map(asyncio.wrap_future, self.calls.values()), return_exceptions=True)
        return self.result()

    def result(self, timeout: float | None = None) -> RewardOutcome:
        """Wait for every reward, and add up the parts. Raises RewardError when a reward broke its contract."""
        zeros = (0.0,) * self.num_completions
        parts: dict[str, tuple[float, ...]] = {}
        errors: list[str] = []
        lost = [""] * self.num_completions
        timed_out = True
        for label, call in self.calls.items():
            result = call.result(timeout)
            if result.violation is not None:
                raise RewardError(result.violation)
            if result.failure is not None:
                errors.append(f"reward {label!r}: {result.failure}")
                timed_out &= result.timed_out
            parts[label] = zeros if result.scores is None else result.scores
            for index, reason in result.lost.items():
                lost[index] = f"reward {label!r}: {reason}"
        totals = [
            sum((reward.weight * parts[label][index] for label, reward in self.rewards.items()), start=0.0)
            for index in range(self.num_completions)
        ]
        return RewardOutcome(
            rewards=zeros if errors else tuple(totals),
            parts=parts,
            valid=(not errors,) * self.num_completions,
            errors=tuple(errors),
            over_budget=tuple(lost),
            timed_out=bool(errors) and timed_out,
        )
