"""The pulse of a training process: its current work, its signs of progress, and the limit for the time between signs.

Each process publishes a small record in shared memory. The supervisor reads the driver's record, each node's agent
reads its actors' records (`launch/agent/watch.py` decides who is late). Neither side uses a disk or a lock, so a
stalled file system is noticed and blocks no one.

Only the code that does the work gives a sign, between two pieces of work:

- The driver: at a change of phase, and when an actor answers. Every phase has a limit.
- A learner: after a microbatch. An engine: after a step of vLLM. A grader: after a group. Only training steps, sampling
  and grading have a limit, because the driver waits for everything else.
- Waiting for disk space or for Ray gives signs too.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_grpo.run.contract import PULSE_VARIABLE, SHM_DIR_VARIABLE
from hpc_grpo.system.processes import start_time

if TYPE_CHECKING:
    from hpc_grpo.config import Config

LOOK_S = 5.0
"""Default interval between two reads of a `WakingClock` by its thread."""

PULSES_NAME = "pulses"
"""The folder of the actors' pulses, inside the node's shared memory of the run."""

ASKED_AGAIN = "generate_wait again"
"""The driver's wait after it replaced an engine or a grader. The lost work takes its time again."""

_STARTS_OF_PHASE = {"resume": 8, "generate_wait": 4, ASKED_AGAIN: 4, "train": 4, "checkpoint": 2, "eval": 8}
"""The longest allowed time of a phase of the driver, in multiples of `deadlines.start_s`."""

_LATE_FACTOR = 10.0
"""Repeating work is late after this many times its longest pause in this run."""

_DRIVER_FACTOR = 5
"""The least limit of a repeating phase of the driver, in multiples of `deadlines.silent_s`: many actors take part."""

_RECORD = struct.Struct("<Qd48s")
_ENDLESS_SIGNS = 1000
"""After this many signs, work counts as new. Otherwise an engine that never pauses would keep its first limit."""


@dataclass(frozen=True)
class Beat:
    """One reading of a pulse. `count` changes at each sign of progress. `limit_s` is inf without a limit."""

    count: int = 0
    limit_s: float = math.inf
    work: str = ""


@dataclass(frozen=True)
class Patience:
    """Limits how long a process may show no progress, in seconds.

    `deadlines_s` has a limit for each kind of work, `other_s` is for other kinds. Work in `repeats` has a shorter
    limit: 10 times its longest pause in the run, but at least `least_s`. It uses the longest pause, not the usual
    one: a false alarm costs more than a late one. `extra_s` is added, by kind of work.
    """

    least_s: float
    other_s: float
    repeats: frozenset[str]
    deadlines_s: Mapping[str, float] = field(default_factory=dict)
    extra_s: Mapping[str, float] = field(default_factory=dict)

    def limit_s(self, work: str, longest_s: float | None) -> float:
        """Return the longest time without progress for `work`.

        >>> patience = Patience(least_s=60.0, other_s=1800.0, repeats=frozenset(["train"]))
        >>> [patience.limit_s("train", longest_s) for longest_s in (None, 1.0, 20.0, 1000.0)]
        [1800.0, 60.0, 200.0, 1800.0]
        """
        limit_s = self.deadlines_s.get(work, self.other_s)
        if work in self.repeats and longest_s is not None:
            limit_s = min(limit_s, max(self.least_s, _LATE_FACTOR * longest_s))
        return limit_s + self.extra_s.get(work, 0.0)


def patience_of_driver(config: Config) -> Patience:
    """Return the limits of the phases of the driver's loop. Other work belongs to the start: `deadlines.start_s`."""
    start_s, rewards_s = config.deadlines.start_s, _longest_reward_s(config)
    deadlines_s = {work: factor * start_s for work, factor in _STARTS_OF_PHASE.items()}
    repeats = frozenset(["generate_wait", "train", "publish", "eval"])
    # A lost environment of an episode is started again, up to twice.
    episode_s = max((3.0 * own.max_turns * own.timeout_s for _, own in config.environments.values()), default=0.0)
    extra_s = dict.fromkeys(("generate_wait", ASKED_AGAIN, "eval"), rewards_s + episode_s)
    if config.train.on_step is not None:
        extra_s["on_step"] = config.deadlines.silent_s
    extra_s["publish"] = config.deadlines.publish_s  # after this time a publish fails by itself, with a reason
    least_s = _DRIVER_FACTOR * config.deadlines.silent_s
    return Patience(least_s, start_s, repeats, deadlines_s, extra_s)


def patience_of_actor(config: Config) -> Patience:
    """Return the limits of a learner, an engine or a grader."""
    deadlines, repeats = config.deadlines, frozenset(["train", "sampling", "grading"])
    extra_s = {"grading": _longest_reward_s(config)}
    return Patience(deadlines.silent_s, deadlines.start_s, repeats, extra_s=extra_s)


class WakingClock:
    """A clock that stops while no thread reads it: in a process stopped by SIGSTOP, a suspended job or machine.

    Counts time, at most `most_s` between two reads. One idle thread reads it regularly; any thread may read.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, most_s: float = 2 * LOOK_S) -> None:
        self._clock, self._most_s = clock, most_s
        self._counted = (0.0, clock())

    def read(self) -> float:
        """Return the seconds counted so far."""
        counted_s, looked_at = self._counted
        return counted_s + min(self._clock() - looked_at, self._most_s)

    def look(self) -> float:
        self._counted = (self.read(), self._clock())
        return self._counted[0]

    def keep_looking(self, every_s: float = LOOK_S) -> None:
        """Read the clock in a thread until this process ends."""

        def keep_on() -> None:
            while True:
                time.sleep(every_s)
                self.look()

        threading.Thread(target=keep_on, name="waking-clock", daemon=True).start()


def _longest_reward_s(config: Config) -> float:
    """Return the time after which the reward workers have ended all calls of one group, such as calls of a judge.

    Each deadline counts twice: a call is repeated once if its worker was stopped (SIGSTOP) or killed.
    """
    # Imported here: all modules that write a run's files import this module, and a command must not load pydantic.
    from hpc_grpo.config.rollout import REWARD_LOAD_S

    num_completions = max(config.rollout.group_size, config.eval.num_samples)
    longest_s = max(sum(reward.longest_call_s(num_completions) for reward in rewards) for rewards in config.reward_sets)
    return 2.0 * longest_s + REWARD_LOAD_S


class Pulse:
    """This process's pulse, for the thread that does the work. Only measures before `open`, and if nobody watches.

    `longest_s` has the longest pause of each kind of work, without the time in which the process or machine was
    stopped.
    """

    def __init__(self, clock: WakingClock | None = None) -> None:
        self._clock = clock or WakingClock()
        self._record: mmap.mmap | None = None
        self._patience = Patience(math.inf, math.inf, frozenset())
        self._beat = Beat()
        self._last = self._clock.read()
        self._signs = 0
        self.longest_s: dict[str, float] = {}

    def open(self, role: str, patience: Patience, longest_s: Mapping[str, float] | None = None) -> None:
        """Publish from now on, if the process has a pulse file. `longest_s` comes from earlier attempts."""
        self._patience = patience
        self.longest_s |= longest_s or {}
        self._clock.keep_looking()
        folder, pid = Path(os.environ.get(SHM_DIR_VARIABLE, "")) / PULSES_NAME, os.getpid()
        path = os.environ.pop(PULSE_VARIABLE, "")  # Children of this process must not use its pulse file.
        if path or folder.is_dir():  # The start time in the name tells processes with the same id apart.
            path = path or str(folder / f"{role}-{pid}-{start_time(pid)}")
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            # Allocate it: on a full tmpfs this raises, while a write into a hole would kill the process.
            os.posix_fallocate(descriptor, 0, _RECORD.size)
            self._record = mmap.mmap(descriptor, _RECORD.size)
            os.close(descriptor)
            self._show(self._beat.work, self._beat.limit_s)

    @property
    def work(self) -> str:
        return self._beat.work

    @contextmanager
    def working(self, on: str) -> Iterator[None]:
        """Mark the block as work of one kind. Its start and its end are signs too. Then the outer work continues."""
        around = self.work
        self.turn_to(on)
        try:
            yield
        finally:
            self.turn_to(around)

    def turn_to(self, work: str) -> None:
        """Start another kind of work. The start is a sign too. "" means no work and has no limit."""
        self._learn()
        self._signs = 0
        self._show(work, self._patience.limit_s(work, self.longest_s.get(work)) if work else math.inf)

    def beat(self) -> None:
        """Show that a piece of the work is done. Its time changes the limit only when work starts again."""
        self._learn()
        self._signs += 1
        if self._signs == _ENDLESS_SIGNS:
            self.turn_to(self._beat.work)
        else:
            self._show(self._beat.work, self._beat.limit_s)

    def _learn(self) -> None:
        now, work = self._clock.read(), self._beat.work
        if work:
            self.longest_s[work] = max(self.longest_s.get(work, 0.0), now - self._last)
        self._last = now

    def _show(self, work: str, limit_s: float) -> None:
        self._beat = Beat(self._beat.count + 1, limit_s, work)
        if self._record is not None:
            _RECORD.pack_into(self._record, 0, self._beat.count, limit_s, work.encode())


PULSE = Pulse()
"""The pulse of this process. A process has one, because it has one main task."""


def read_pulse(descriptor: int) -> Beat:
    """Return the content of a pulse file. A process that has not opened it yet has no limit."""
    content = os.pread(descriptor, _RECORD.size, 0)
    if len(content) < _RECORD.size:
        return Beat()
    count, limit_s, work = _RECORD.unpack(content)
    return Beat(count, limit_s, work.rstrip(b"\0").decode(errors="replace")) if count else Beat()
