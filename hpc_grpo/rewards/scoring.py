"""Scores completions by a built-in, one after the other, in a child process: each completion has a budget.

Runs in a reward worker, or in whatever process calls `hpc_grpo.rewards.score`. The worker forks the child with its
first call, and again when a completion ended the child. A fork takes milliseconds: the worker has the libraries.

A completion can end its child: by its budget of processor time, its deadline, or a crash. That completion scores 0, and
the next child scores the rest. Processor time decides, not the clock: a busy node must not change a score. The kernel
ends the child, also inside C code, where no alarm of Python's is handled.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpc_grpo.errors import ConfigError, HpcGrpoError
from hpc_grpo.system.processes import hold_on, tie_to_parent

if TYPE_CHECKING:
    from hpc_grpo.rewards import BuiltIn, Group
    from hpc_grpo.section import Section

_MAX_MEMORY_BYTES = 4 << 30
"""Address space that the child takes beyond the worker's, which may be any: a reward beside `math` may import torch."""

_Kind = Literal["score", "end", "exhausted", "raised", "refused"]


class ScoringError(Exception):
    """The reward failed, not a completion: it has no verdict on the group."""


class ScoringTimeoutError(ScoringError, TimeoutError):
    """Most completions of the group met their deadline by the clock."""


@dataclass
class Scored:
    """Holds the scores of a group. `lost` maps the completions that ended their child to what happened."""

    scores: list[float] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Loss:
    """Says what ended a child's work. `is_certain`: the completion did it, and would do it again."""

    reason: str
    is_certain: bool = False
    is_by_clock: bool = False


class Scorer:
    """Owns the child process."""

    def __init__(self) -> None:
        self._child: int | None = None
        self._connection: Connection | None = None
        self._loaded: set[str] = set()

    def load(self, built_in: BuiltIn) -> None:
        """Import a built-in's libraries, which the next child then has. Raises ConfigError where one is missing."""
        if built_in.load is not None and built_in.name not in self._loaded:
            built_in.load()
            self._loaded.add(built_in.name)
            self.close()

    def score(
        self,
        built_in: BuiltIn,
        settings: Section,
        group: Group,
        completion_s: float,
        progress: Callable[[], object] = lambda: None,
    ) -> Scored:
        """Score a group; calls `progress` whenever a completion is done.

        What may not be a completion's doing is tried once more: a signal from outside, or an exception. It counts as
        the completion's where most of the group can be scored. Raises ScoringError where most of it cannot, and
        ConfigError where the reward refuses its data.
        """
        self.load(built_in)
        found, doubtful, retried = Scored(), 0, -1
        while (loss := self._run(built_in, settings, group, completion_s, found.scores, progress)) is not None:
            index = len(found.scores)
            progress()
            if not loss.is_certain:
                if retried != index and not loss.is_by_clock:
                    retried = index
                    continue
                doubtful += 1
                if 2 * doubtful > len(group.completions):
                    raise (ScoringTimeoutError if loss.is_by_clock else ScoringError)(loss.reason)
            found.lost[index] = loss.reason
            found.scores.append(0.0)
            if len(found.scores) == len(group.completions):
                break
        return found

    def _run(
        self,
        built_in: BuiltIn,
        settings: Section,
        group: Group,
        completion_s: float,
        scores: list[float],
        progress: Callable[[], object],
    ) -> _Loss | None:
        """Add the scores of the completions that have none; returns what ended that, None at the end of the group."""
        rest = replace(group, completions=group.completions[len(scores) :])
        connection = self._connection or self._start()
        try:
            connection.send((built_in.name, settings, rest, completion_s if built_in.runs_here else None))
            while connection.poll(group.timeout_s):
                kind, value = connection.recv()
                if kind == "end":
                    return None
                if kind == "refused":
                    raise ConfigError(value)
                if kind != "score":
                    return _Loss(value, is_certain=kind == "exhausted")
                scores.append(value)
                progress()
        except (EOFError, ConnectionError):
            return self._loss_of(self.close(), completion_s)
        assert self._child is not None
        was_stopped = hold_on(self._child) == "stopped"
        self.close()
        return _Loss(
            f"did not return within {group.timeout_s:g} s; its process was killed", is_by_clock=not was_stopped
        )

    def _loss_of(self, status: int, completion_s: float) -> _Loss:
        if status == -signal.SIGPROF:
            return _Loss(f"took more than {completion_s:g} s of processor time", is_certain=True)
        how = f"exit code {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
        return _Loss(f"ended its process ({how})")

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        parent = os.getpid()
        if (child := os.fork()) == 0:
            try:
                ours.close()
                _answer(theirs, parent)
            finally:
                os._exit(1)  # never back into the worker's loop
        theirs.close()
        self._child, self._connection = child, ours
        return ours

    def close(self) -> int:
        """Kill the child, if there is one; returns its exit status, which is its own if it had begun to end."""
        child, connection = self._child, self._connection
        self._child = self._connection = None
        if child is None or connection is None:
            return 0
        connection.close()
        os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@cache
def scorer() -> Scorer:
    """Return this process's scorer."""
    return Scorer()


def _answer(connection: Connection, parent: int) -> None:
    """Serve the calls that arrive, until the parent closes its end."""
    tie_to_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    while True:
        try:
            name, settings, group, budget_s = connection.recv()
        except EOFError:
            return
        most = hard if budget_s is None else used + _MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        for message in _scored(name, settings, group, budget_s or 0.0):
            connection.send(message)


def _scored(name: str, settings: Any, group: Group, budget_s: float) -> Iterator[tuple[_Kind, Any]]:
    """Yield each score, and what ended them. `budget_s` is 0 where there is none."""
    from hpc_grpo.registry import REWARDS

    try:
        scores = iter(REWARDS.find(name)(group, settings))
        while True:
            signal.setitimer(signal.ITIMER_PROF, budget_s)
            value = next(scores, None)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            if value is None:
                break
            yield "score", value
    except HpcGrpoError as error:
        yield "refused", str(error)
    except (RecursionError, MemoryError, OverflowError) as error:
        yield "exhausted", f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - a library may raise anything; it becomes a record
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = "" if place is None else f" ({place.tb_frame.f_code.co_filename}:{place.tb_lineno})"
        yield "raised", f"{type(error).__name__}: {error}{where}"
    else:
        yield "end", None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
