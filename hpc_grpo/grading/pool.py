"""The pool of reward workers: grades groups, each reward with its own deadline.

Runs in the grader's process, and in the driver to check rewards. Many groups may run at once. Waits for the slowest
reward of the group. `worker.py` is the worker's side.

A reward that raises, hangs or dies masks its group and adds an error line; the driver decides whether the run
continues. A reward that breaks its contract always stops the run.

The pools of multiprocessing and Pebble are not used. Their workers share a pipe and its locks, so a worker that dies
with a lock breaks the whole pool. Their spawned processes also import the parent's main module, which is Ray in a Ray
actor. Here each worker has its own socket, and starts with the imports of the registry only.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import LifoQueue, SimpleQueue
from threading import Thread
from typing import Any

import psutil

from hpc_grpo.config import RewardConfig
from hpc_grpo.config.rollout import REWARD_LOAD_S
from hpc_grpo.errors import ConfigError, HpcGrpoError, RewardAwayError, RewardError
from hpc_grpo.grading.worker import Call, CallResult, Preparation
from hpc_grpo.registry import REWARDS
from hpc_grpo.rewards import Group
from hpc_grpo.rewards.scoring import FROM_OUTSIDE, end_of
from hpc_grpo.system.processes import hold_on, kill_group, start_program
from hpc_grpo.system.secret import environ_for
from hpc_grpo.system.usage import Meter, Usage

_RESUME_S = 600.0
"""Extra seconds for a reward's `prepare` on a resume, which may wait for a server. Independent of `timeout_s`: the wait
must end with its own message before `deadlines.start_s` ends it.
"""

_GRACE_S = 5.0
"""Extra seconds before a built-in's worker is killed: the worker itself stops a completion at its deadline."""

_MAX_TRIES = 2
"""A call is retried once if its worker died for a reason outside the call. After a second death the reward fails."""


@dataclass(frozen=True)
class RewardOutcome:
    """A graded group. All tuples except `errors` have one entry per completion.

    `rewards` is the weighted sum of `parts`, which are not weighted. If a reward failed, its part and `rewards` are 0.0
    and `valid` is False for all completions. `errors` has one line for each failed reward. `timed_out` is True if each
    failed reward missed its deadline. `over_budget` says how a completion used up a reward's limit, else "". Such a
    completion gets the reward's worst possible score.
    """

    rewards: tuple[float, ...]
    parts: Mapping[str, tuple[float, ...]]
    valid: tuple[bool, ...]
    errors: tuple[str, ...]
    over_budget: tuple[str, ...]
    timed_out: bool = False


class RewardPool:
    """Runs the rewards of a config in `num_workers` processes, each started by its first call."""

    def __init__(
        self, rewards: Sequence[RewardConfig], num_workers: int, load_timeout_s: float = REWARD_LOAD_S
    ) -> None:
        [self._rewards] = labelled([rewards])
        self._known = [(reward, _function_name(reward), reward.settings() or reward.args) for reward in rewards]
        """Each reward with its function's name and its checked arguments, for calls to workers."""
        self._load_timeout_s = load_timeout_s
        self._closed = False
        names, environ = tuple(name for _, name, _ in self._known), _environ_for(rewards)
        self._slots = [WorkerSlot(names, load_timeout_s, environ) for _ in range(num_workers)]
        self._idle: LifoQueue[WorkerSlot] = LifoQueue()  # LIFO: the last used worker has imported the rewards
        for slot in self._slots:
            self._idle.put(slot)
        # A worker dies with the thread that started it (PDEATHSIG), so these threads live as long as the pool. They
        # are daemons: a process that ends without `close` would wait for an executor's threads and their queued calls.
        self._queue: SimpleQueue[tuple[Call | Preparation, float, Future[CallResult]] | None] = SimpleQueue()
        self._threads = [Thread(target=self._run, name="reward-slot", daemon=True) for _ in range(num_workers)]
        for thread in self._threads:
            thread.start()

    def check(self, *, is_resume: bool = False) -> tuple[str, ...]:
        """Import and prepare the rewards in workers, one after the other. Return their notes for the user.

        Raises ConfigError if a reward fails or misses the deadline. On a resume, raises RewardAwayError if a reward
        misses the deadline, or its server does not answer.
        """
        notes = []
        for reward, name, args in self._known:
            patience_s = self._load_timeout_s + (_RESUME_S if is_resume else 0.0)
            result = self._put(Preparation(name, args, reward.timeout_s, is_resume), patience_s).result()
            if result.away is not None:
                raise RewardAwayError(result.away)
            if (problem := result.violation or result.failure) is not None:
                raise (RewardAwayError if is_resume and result.timed_out else ConfigError)(problem)
            notes += [] if result.note is None else [result.note]
        return tuple(notes)

    def submit(
        self,
        prompt: str,
        completions: Sequence[str],
        fields: Mapping[str, Any],
        rewards: Mapping[str, RewardConfig] | None = None,
        images: tuple[bytes, ...] = (),
    ) -> PendingGroup:
        """Begin to grade one group by `rewards`, by label; None: all rewards of the pool. {} gives the reward 0.0."""
        rewards = self._rewards if rewards is None else rewards
        calls = {}
        for label, reward in rewards.items():
            group = Group(prompt, tuple(completions), fields, reward.timeout_s, images)
            same = (reward.name, reward.args)
            name, args = next((name, args) for own, name, args in self._known if (own.name, own.args) == same)
            # The worker itself stops a built-in's completion at the deadline; kill the worker only later.
            grace_s = 0.0 if ":" in reward.name else _GRACE_S
            calls[label] = self._put(Call(name, args, group), reward.timeout_s + grace_s)
        return PendingGroup(rewards, len(completions), calls)

    def usage(self) -> list[Usage | None]:
        """Return each worker's usage since the last call; None for a dead worker."""
        return [slot.usage() for slot in self._slots]

    def close(self) -> None:
        """Kill the workers at once. Unfinished calls raise HpcGrpoError."""
        self._closed = True
        for slot in self._slots:
            slot.close()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        for slot in self._slots:
            slot.end_worker()

    def _put(self, call: Call | Preparation, timeout_s: float) -> Future[CallResult]:
        if self._closed:
            raise HpcGrpoError("The reward pool is closed.")
        answer: Future[CallResult] = Future()
        self._queue.put((call, timeout_s, answer))
        return answer

    def _run(self) -> None:
        while (queued := self._queue.get()) is not None:
            call, timeout_s, answer = queued
            if answer.set_running_or_notify_cancel():
                try:
                    result = self._serve(call, timeout_s)
                except BaseException as error:  # noqa: BLE001 - raised by whoever waits for this call
                    answer.set_exception(error)
                else:
                    answer.set_result(result)

    def _serve(self, call: Call | Preparation, timeout_s: float) -> CallResult:
        slot = self._idle.get()  # there are as many threads as slots
        try:
            return slot.serve(call, timeout_s)
        finally:
            self._idle.put(slot)


@dataclass(frozen=True)
class PendingGroup:
    """A group whose rewards are being computed. `calls` maps each reward's label to its call."""

    rewards: Mapping[str, RewardConfig]
    num_completions: int
    calls: Mapping[str, Future[CallResult]]

    async def wait(self) -> RewardOutcome:
        """Return `result()` once every reward has answered, without blocking a thread. Raises the same errors."""
        await asyncio.gather(*map(asyncio.wrap_future, self.calls.values()), return_exceptions=True)
        return self.result()

    def result(self, timeout: float | None = None) -> RewardOutcome:
        """Wait for every reward, and add up the parts. Raises RewardError when a reward broke its contract."""
        zeros = (0.0,) * self.num_completions
        parts: dict[str, tuple[float, ...]] = {}
        errors: list[str] = []
        lost = [""] * self.num_completions
        timed_out = True
        for label, reward in self.rewards.items():
            result = self.calls[label].result(timeout)
            if result.violation is not None:
                raise RewardError(result.violation)
            if result.failure is not None:
                errors.append(f"reward {label!r}: {result.failure}")
                timed_out &= result.timed_out
            scores = list(zeros if result.scores is None else result.scores)
            for index, reason in result.lost.items():
                lost[index] = f"reward {label!r}: {reason}"
                built_in = REWARDS.find(reward.name)
                scores[index] = 1.0 if reward.weight < 0 else built_in.least
            parts[label] = tuple(scores)
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


class _WorkerLostError(Exception):
    """The worker ended, or SIGSTOP stopped it. `how`: for errors; `is_calls_fault`: a retry would end the same way."""

    def __init__(self, how: str, *, is_calls_fault: bool) -> None:
        self.how, self.is_calls_fault = how, is_calls_fault


class WorkerSlot:
    """Holds one worker process at a time, and serves one call at a time."""

    def __init__(self, names: Sequence[str], load_timeout_s: float, environ: Mapping[str, str]) -> None:
        self._names, self._load_timeout_s, self._environ = names, load_timeout_s, environ
        self._worker: _WorkerProcess | None = None
        self._closed = False
        self._lock = threading.Lock()
        """Held to start, drop and close a worker, so that no worker is started or killed twice."""

    def close(self) -> None:
        """Kill the worker at once. No other worker starts."""
        with self._lock:
            self._closed = True
            if self._worker is not None:
                kill_group(self._worker.process.pid)

    def usage(self) -> Usage | None:
        """Return the worker's usage since the last call. None without a running worker."""
        if not self._lock.acquire(blocking=False):  # do not wait: a killed worker may take long to end
            return None
        try:
            return None if self._worker is None else self._worker.meter.read()
        except psutil.NoSuchProcess:  # It has died, and its thread will notice soon.
            return None
        finally:
            self._lock.release()

    def serve(self, call: Call | Preparation, timeout_s: float) -> CallResult:
        """Run the call and return its result or failure. Retry once if its worker ended for a reason outside it.

        Raises HpcGrpoError after `close`.
        """
        how = ""
        for _ in range(_MAX_TRIES):
            try:
                if self._worker is None and (failed := self._start_worker()) is not None:
                    return failed
                return self._ask(call, timeout_s)  # type: ignore[no-any-return]
            except TimeoutError:
                what = f"Reward {call.reward!r} " if isinstance(call, Preparation) else ""  # the caller names a call's
                failure = f"{what}did not return within {timeout_s:g} s; its process was killed"
                return CallResult(failure=failure, timed_out=True)
            except _WorkerLostError as error:
                how = error.how
                if error.is_calls_fault:
                    return CallResult(failure=how)
        return CallResult(failure=f"{how}, {_MAX_TRIES} times")

    def end_worker(self) -> int:
        """Kill the worker and its processes, and drop it. Return its exit code; 0 without a worker."""
        with self._lock:
            worker, self._worker = self._worker, None
            return 0 if worker is None else worker.end()

    def _start_worker(self) -> CallResult | None:
        """Start a worker and import the rewards, within a deadline. Return the failure, or None."""
        with self._lock:
            if self._closed:
                raise HpcGrpoError("The reward pool was closed before the call.")
            self._worker = _WorkerProcess(self._environ)
        importing = f"Importing {', '.join(self._names)}"
        try:
            failure: str | None = self._ask(self._names, self._load_timeout_s)
        except TimeoutError:
            fix = "Import it by hand on a compute node, and move slow work from the module to the first call."
            late = f"{importing} did not end within {self._load_timeout_s:g} s. {fix}"
            return CallResult(failure=late, timed_out=True)
        except _WorkerLostError as error:
            if not error.is_calls_fault:
                raise
            return CallResult(failure=f"{importing}: {error.how}.")
        if failure is not None:
            self.end_worker()
            return CallResult(failure=failure)
        return None

    def _ask(self, message: Any, timeout_s: float) -> Any:
        """Send a message to the worker and return its answer. Each sign of progress restarts the timeout.

        Raises TimeoutError, _WorkerLostError, or HpcGrpoError after `close`. The worker is ended in each case.
        """
        worker, took_message = self._worker, False
        assert worker is not None
        try:
            worker.set_timeout(timeout_s)
            worker.connection.send(message)
            while not (answer := worker.connection.recv_bytes()):
                took_message = True
            return pickle.loads(answer)
        except BlockingIOError:
            was_stopped = hold_on(worker.process.pid) == "stopped"
            self.end_worker()
            if was_stopped:
                raise _WorkerLostError("its process was stopped (SIGSTOP)", is_calls_fault=False) from None
            raise TimeoutError from None
        except (EOFError, ConnectionError) as error:
            code = self.end_worker()
            if self._closed:
                raise HpcGrpoError("The reward pool was closed during a call.") from error
            end = end_of(code) + ("; out of memory?" if code == -signal.SIGKILL else "")
            is_calls_fault = took_message and code not in FROM_OUTSIDE
            raise _WorkerLostError(f"ended its process ({end})", is_calls_fault=is_calls_fault) from error


class _WorkerProcess:
    """A reward process (`worker.main`) and its socket."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.process, self._socket = start_program("hpc_grpo.grading.worker", environ)
        self.connection = Connection(os.dup(self._socket.fileno()))
        self.meter = Meter(self.process.pid)

    def set_timeout(self, timeout_s: float) -> None:
        seconds, part = divmod(max(timeout_s, 1e-3), 1.0)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(part * 1e6)))

    def end(self) -> int:
        kill_group(self.process.pid)
        self.connection.close()
        self._socket.close()
        return int(self.process.wait())


def labelled(reward_sets: Sequence[Sequence[RewardConfig]]) -> list[dict[str, RewardConfig]]:
    """Label the rewards of each set by their names. Another reward of a name gets #2, #3 …

    Rewards of two sets share a label if name and arguments are equal. Weights may differ: scores are not weighted.

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
    """Return a worker's environment variables, with only the secrets that its rewards list.

    A proxy's address may contain a password. Only workers of built-ins that call a server get it.
    """
    named = {
        name
        for reward in rewards
        for name in (*reward.pass_env, reward.args.get("api_key_env"), reward.args.get("token_env"))
    }
    if any(":" not in reward.name and not REWARDS.find(reward.name).is_one_by_one for reward in rewards):
        named |= {name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")}
    return environ_for(named)


def _function_name(reward: RewardConfig) -> str:
    """Return the function's name for a worker, with an absolute file path: the worker may start in another folder."""
    module, separator, attribute = reward.name.rpartition(":")
    return f"{Path(module).absolute()}:{attribute}" if separator and module.endswith(".py") else reward.name
