"""The supervisor's events, and the actions that it performs in reaction.

`Supervisor` observes an `Event`, `transitions.py` answers with `Action`s, `Processes` performs them (supervisor.py).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_grpo.errors import EndAskedError, HpcGrpoError, NodesUnavailableError
from hpc_grpo.launch.place.base import End


@dataclass(frozen=True)
class RunFacts:
    """The run directory when something ended. `step` is that of the newest checkpoint."""

    step: int = 0
    is_complete: bool = False
    stop_asked: bool = False


class Now(enum.Enum):
    """Events without parameters. Each value describes its event."""

    RAY_READY = "every node and GPU has joined Ray"
    NODES_TOLD = "a signal asked the agents to end; the supervisor has not been sent one, or not yet"
    TICK = "time has passed"


@dataclass(frozen=True)
class BringUpFailed:
    """A node failed before all were in Ray, or they took too long. `may_come_back`: the place waits for lost nodes."""

    error: NodesUnavailableError
    facts: RunFacts = RunFacts()
    may_come_back: bool = False


@dataclass(frozen=True)
class Signalled:
    """The supervisor received a signal: SIGTERM, SIGHUP and SIGINT ask it to end; SIGUSR1 warns that walltime ends."""

    signal: int


@dataclass(frozen=True)
class QueueAnswered:
    """The queue's answer to ASK_QUEUE. `left_s` is the rest time of a preempted job; None if it is not preempted."""

    left_s: float | None


@dataclass(frozen=True)
class DriverStuck:
    """The driver is stopped or makes no progress; `why` is a sentence."""

    why: str


@dataclass(frozen=True)
class ProcessLate:
    """A node's agent ends a process that is stopped or makes no progress: an actor or a process of Ray."""

    why: str


@dataclass(frozen=True)
class Loss:
    """Why a node's agent or Ray ended. `is_machine`: the node itself is gone, not only its processes."""

    why: str
    is_machine: bool = False


@dataclass(frozen=True)
class NodesLost:
    """All nodes lost until now, including those reported before."""

    nodes: Mapping[str, Loss]


@dataclass(frozen=True)
class DriverEnded:
    """The driver ended. `last_error` is its last printed error, in one line."""

    returncode: int
    facts: RunFacts = RunFacts()
    last_error: str = ""


@dataclass(frozen=True)
class FormedAgain:
    """The result of FORM_AGAIN: agents start on the nodes that answer. If `is_enough` is False, nothing runs.

    `error` names missing nodes, or says that the end was requested meanwhile (`stop_asked`: by the STOP file).
    """

    is_enough: bool
    error: NodesUnavailableError | EndAskedError | None = None
    stop_asked: bool = False


Event = (
    Now | BringUpFailed | Signalled | QueueAnswered | DriverStuck | ProcessLate | NodesLost | DriverEnded | FormedAgain
)


class Do(enum.Enum):
    """Actions without parameters. Each value describes its action."""

    PUBLISH_RAY = "tell the driver, which waits for it, where Ray is"
    KILL_DRIVER = "send the driver SIGKILL"
    WRITE_STACKS = "have every process of training write its stacks"
    FORM_AGAIN = "end every agent, and bring Ray up anew on the nodes that answer"
    ASK_QUEUE = "ask the queue whether it preempts this job"
    LET_NODES_GO = "have agents end at once that a signal asks to end"
    NAME_STOPPED = "have agents report processes that are stopped: a crash may be for want of one"
    SAVE_RECORD = "write attempt.json"


@dataclass(frozen=True)
class Forward:
    signal: int


@dataclass(frozen=True)
class StartDriver:
    """Start the driver again, from the newest checkpoint. `why` is how the previous driver ended."""

    why: str


@dataclass(frozen=True)
class Say:
    text: str


@dataclass(frozen=True)
class NoteLate:
    """Record that a process was ended for being late, and say so."""

    why: str


@dataclass(frozen=True)
class Fail:
    """Raise an error for the command line: training has not begun."""

    error: HpcGrpoError


Action = Do | Forward | StartDriver | Say | NoteLate | Fail | End
