"""Scores completions by a built-in, one after the other, in a child process: each completion has a time limit.

Runs in a reward worker, or in any process that calls `hpc_grpo.rewards.score`. The worker forks the child at its first
call, and again after a completion ended the child. A fork takes milliseconds, because the worker has the libraries.

A completion ends the child if it exceeds its processor time or its deadline, or crashes. This completion gets the
reward's lowest score, and the next child scores the rest. Processor time decides first, not the clock: a busy node must
not change a score. The kernel ends the child even inside C code, where Python cannot handle an alarm.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpc_grpo.errors import ConfigError, HpcGrpoError, described
from hpc_grpo.registry import REWARDS
from hpc_grpo.system.processes import hold_on, tie_to_parent
from hpc_grpo.system.signals import signal_name

if TYPE_CHECKING:
    from hpc_grpo.rewards import BuiltIn, Group
    from hpc_grpo.section import Section

_MAX_MEMORY_BYTES = 4 << 30
"""Address space that the child may add to the worker's. The worker's may be large: a reward may import torch."""

_Kind = Literal["score", "end", "exhausted", "crashed", "raised", "refused", "late"]

FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)


class ScoringError(Exception):
    """The reward failed, not a completion. The group gets no score."""


class ScoringTimeoutError(ScoringError, TimeoutError):
    """Most completions of the group exceeded their deadline in wall time."""


@dataclass
class Scored:
    """The scores of a group. `lost` maps the completions that ended their child to what happened."""

    scores: list[float] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)


class Scorer:
    """Owns the child process."""

    def __init__(self) -> None:
        self._child: tuple[int, Connection] | None = None
        self._loaded: set[str] = set()
        self._lock = threading.RLock()
        """Held by the thread that uses the child: an answer does not say which call it answers."""

    def load(self, built_in: BuiltIn) -> None:
        """Import a built-in's libraries, which the next child then has. Raises ConfigError if one is missing."""
        if built_in.load is not None and built_in.name not in self._loaded:
            built_in.load()
            self._loaded.add(built_in.name)
            self.close()

    def score(
        self, built_in: BuiltIn, settings: Section, group: Group, progress: Callable[[], object] = lambda: None
    ) -> Scored:
        """Score a group. Calls `progress` after each completion.

        Retries once after a signal or an exception, because the completion may not be the cause. A second crash counts
        as the completion's fault. Another second failure does too, if most of the group can be scored. Raises
        ScoringError if most cannot be scored, and ConfigError if the reward refuses its data.
        """
        found, doubtful, retried = Scored(), 0, -1
        with self._lock:
            self.load(built_in)
            while (index := len(found.scores)) < len(group.completions):
                rest = replace(group, completions=group.completions[index:])
                for kind, value in self._messages(built_in, settings, rest):
                    if kind == "score":
                        found.scores.append(value)
                        progress()
                if kind == "end":
                    break
                if kind == "refused":
                    raise ConfigError(value)
                index = len(found.scores)
                progress()
                if kind != "exhausted":
                    if retried != index and kind != "late":
                        retried = index
                        continue
                    doubtful += kind != "crashed"
                    if 2 * doubtful > len(group.completions):
                        raise (ScoringTimeoutError if kind == "late" else ScoringError)(value)
                found.lost[index] = value
                found.scores.append(built_in.least)
        return found

    def _messages(self, built_in: BuiltIn, settings: Section, group: Group) -> Iterator[tuple[_Kind, Any]]:
        """Yield the child's messages. The last one says how the scoring ended."""
        child, connection = self._child or self._start()
        try:
            connection.send((built_in.name, settings, group))
            kind: _Kind = "score"
            while kind == "score" and connection.poll(group.timeout_s):
                kind, value = connection.recv()
                yield kind, value
            if kind != "score":
                return
        except (EOFError, ConnectionError):
            status = self.close()
            if status == -signal.SIGPROF:
                yield "exhausted", f"took more than {_limit_s(settings):g} s of processor time"
            else:
                is_crash = status < 0 and status not in FROM_OUTSIDE
                yield "crashed" if is_crash else "raised", f"ended its process ({end_of(status)})"
            return
        kind = "raised" if hold_on(child) == "stopped" else "late"  # SIGSTOP is not its fault
        self.close()
        yield kind, f"did not return within {group.timeout_s:g} s; its process was killed"

    def _start(self) -> tuple[int, Connection]:
        ours, theirs = Pipe()
        parent = os.getpid()
        if (child := os.fork()) == 0:
            try:
                ours.close()
                _answer(theirs, parent)
            finally:
                os._exit(1)  # never back into the worker's loop
        theirs.close()
        self._child = child, ours
        return self._child

    def close(self) -> int:
        """Kill the child, if there is one. Return the child's exit status: -9, unless the child was already ending."""
        if self._child is None:
            return 0
        (child, connection), self._child = self._child, None
        connection.close()
        os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


_scorers: defaultdict[int, Scorer] = defaultdict(Scorer)


def scorer() -> Scorer:
    """Return this process's scorer. A fork has another one than its parent."""
    return _scorers[os.getpid()]


def end_of(code: int) -> str:
    """Return how a process ended, by its exit code: negative for a signal."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


def _limit_s(settings: Section) -> float:
    """Return the processor time limit of a completion; 0.0 if its program runs in a sandbox with other limits."""
    return getattr(settings, "completion_s", 0.0)


def _answer(connection: Connection, parent: int) -> None:
    """Serve calls until the parent closes its end."""
    tie_to_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    while True:
        try:
            name, settings, group = connection.recv()
        except EOFError:
            return
        limit_s = _limit_s(settings)
        most = used + _MAX_MEMORY_BYTES if limit_s else hard
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        for message in _scored(name, settings, group, limit_s):
            connection.send(message)


def _scored(name: str, settings: Any, group: Group, budget_s: float) -> Iterator[tuple[_Kind, Any]]:
    """Yield each score, then how the scoring ended. `budget_s` limits a completion's processor time; 0: no limit."""
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
        yield "raised", described(error)
    else:
        yield "end", None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
