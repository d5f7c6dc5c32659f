"""Decide the supervisor's reaction to an event of an attempt: a pure function of state and event.

`react(state, event, now)` returns the next state and the actions to perform, in order. Nothing here waits, reads a
file or starts a process: `Supervisor` observes the events, `Processes` performs the actions (supervisor.py).

    phase     event               actions, in order                                     next phase
    --------  ------------------  ----------------------------------------------------  -------------------
    bring_up  RAY_READY           PUBLISH_RAY                                           training
    bring_up  BringUpFailed       Fail; if nodes were lost before or may come back, as  over
                                  for lost nodes (below)
    bring_up  asked to end        Forward, SAVE_RECORD, Fail; also after NODES_TOLD     over
    training  asked to end        Forward, SAVE_RECORD; after SIGTERM and SIGHUP        training
                                  ASK_QUEUE, and KILL_DRIVER after the place's grace
    training  NODES_TOLD          Forward, SAVE_RECORD, ASK_QUEUE; KILL_DRIVER as       training
                                  above
    training  job is preempted    KILL_DRIVER shortly before the job's end              training
    training  job is cancelled    LET_NODES_GO                                          training
    training  asked to end again  Forward, SAVE_RECORD; KILL_DRIVER now                 training
    training  NodesLost           SAVE_RECORD, Say; KILL_DRIVER in 10 s                 training
    bring_up  DriverEnded         see "how the driver ended"                            see below
    training  DriverEnded         the same; after an error first NAME_STOPPED and 3 s,  settling
                                  to learn of a lost node or a process under SIGSTOP
    settling  3 s, NodesLost      see "how the driver ended"                            see below
    any       SIGUSR1             Forward: walltime ends, the driver checkpoints        the same
    any       DriverStuck         WRITE_STACKS; KILL_DRIVER in 5 s                      the same
    any       ProcessLate         NoteLate: the driver replaces the process or crashes  the same

    how the driver ended         if a retry may help                                    else
    ---------------------------  -----------------------------------------------------  -----------------
    complete, resumable, config  -                                                      End
    crash                        StartDriver, on the same nodes                         End
    lost nodes                   FORM_AGAIN, then after FormedAgain StartDriver or End  End

A retry may help unless a signal, preemption or the STOP file asked for the end, or a user watches. The second try
in a row without a new checkpoint ends the attempt. Crashes and lost nodes count separately.
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hpc_grpo.errors import (
    EXIT_COMPLETE,
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_RESUMABLE,
    EXIT_UNAVAILABLE,
    ConfigError,
    EndAskedError,
    HpcGrpoError,
    LaunchError,
    NodesUnavailableError,
)
from hpc_grpo.launch.place.base import End
from hpc_grpo.run.attempt import ExitKind
from hpc_grpo.system.signals import END_SIGNALS, signal_name

DRIVER_GRACE_S = 10.0
_SETTLE_S = 3.0  # A driver may end because a node or process died. Its agent needs a moment to report that.
_STACKS_S = 5.0  # time for processes to write their stacks
_EXPLAINS_S = 60.0  # A driver's crash this soon after a late process was ended is blamed on that process.
_TEARDOWN_S = 10.0  # part of a preempted job's remaining time, kept for the teardown of its nodes


@dataclass(frozen=True)
class RunFacts:
    """The run directory's state at an event. `step` is the step of the newest checkpoint."""

    step: int = 0
    is_complete: bool = False
    stop_asked: bool = False


class Now(enum.Enum):
    """Events without parameters. Each value describes its event."""

    RAY_READY = "every node and GPU has joined Ray"
    NODES_TOLD = "a signal asked the agents to end; the supervisor has received none so far"
    TICK = "time has passed"


@dataclass(frozen=True)
class BringUpFailed:
    """Ray failed to start on a node, or took too long. `may_come_back`: the place waits for lost nodes."""

    error: NodesUnavailableError
    facts: RunFacts = RunFacts()
    may_come_back: bool = False


@dataclass(frozen=True)
class Signalled:
    """The supervisor received a signal: SIGTERM, SIGHUP and SIGINT ask it to end; SIGUSR1 warns that walltime ends."""

    signal: int


@dataclass(frozen=True)
class QueueAnswered:
    """The queue's answer to ASK_QUEUE. `left_s` is a preempted job's remaining time, None for other jobs."""

    left_s: float | None


@dataclass(frozen=True)
class DriverStuck:
    """The driver is stopped (SIGSTOP) or makes no progress. `why` is a sentence."""

    why: str


@dataclass(frozen=True)
class ProcessLate:
    """A node's agent ends an actor or a process of Ray that is stopped (SIGSTOP) or makes no progress."""

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
    """The result of FORM_AGAIN. If `is_enough`, agents start on the nodes that answered; otherwise nothing runs.

    `error` names missing nodes, or says that the end was requested while waiting (`stop_asked`: by the STOP file).
    """

    is_enough: bool
    error: NodesUnavailableError | EndAskedError | None = None
    stop_asked: bool = False


Event = (
    Now | BringUpFailed | Signalled | QueueAnswered | DriverStuck | ProcessLate | NodesLost | DriverEnded | FormedAgain
)


class Do(enum.Enum):
    """Actions without parameters. Each value describes its action."""

    PUBLISH_RAY = "send Ray's address to the waiting driver"
    KILL_DRIVER = "send the driver SIGKILL"
    WRITE_STACKS = "have every process of the training write its stacks"
    FORM_AGAIN = "end every agent, and bring Ray up anew on the nodes that answer"
    ASK_QUEUE = "ask the queue whether it preempts this job"
    LET_NODES_GO = "order the agents to end at once after a signal to end"
    NAME_STOPPED = "order the agents to report processes stopped by SIGSTOP: one may have caused a crash"
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
    """Record and print that a late process was ended."""

    why: str


@dataclass(frozen=True)
class Fail:
    """Raise an error for the command line: training has not begun."""

    error: HpcGrpoError


Action = Do | Forward | StartDriver | Say | NoteLate | Fail | End


@dataclass(frozen=True)
class State:
    """The state that decides a reaction, besides the event. Times are those of `time.monotonic()`.

    `step` is the newest checkpoint at the driver's last start. `stop_grace_s` is the place's limit for the driver's
    checkpoint after SIGTERM or SIGHUP. Ctrl+C has no limit; a second signal ends the driver at once. `signalled` is the
    signal that asked this process to end. `told` is the reason if only the nodes were asked, for example by preemption.
    `lost` maps nodes of this Ray to the reason of their loss. `stalled` counts tries in a row without a new checkpoint,
    by how the driver ended. `late` is why the last late process was ended, at `late_at`. `ended` is the driver's end,
    while settling. `ending` is how the attempt ends if FORM_AGAIN finds too few nodes.
    """

    max_stalled: int
    stacks_dir: Path
    stop_grace_s: float = math.inf
    step: int = 0
    phase: Literal["bring_up", "training", "settling", "forming", "over"] = "bring_up"
    was_formed_again: bool = False
    signalled: str = ""
    told: str = ""
    stuck: str = ""
    late: str = ""
    late_at: float = -math.inf
    lost: Mapping[str, str] = field(default_factory=dict)
    kill_at: float = math.inf
    settled_at: float = math.inf
    stalled: Mapping[ExitKind, int] = field(default_factory=dict)
    ended: DriverEnded | None = None
    ending: End | None = None

    @property
    def is_over(self) -> bool:
        return self.phase == "over"


Reaction = tuple[State, list[Action]]


def react(state: State, event: Event, now: float) -> Reaction:
    match event:
        case Now.RAY_READY:
            return replace(state, phase="training"), [Do.PUBLISH_RAY]
        case BringUpFailed():
            return _on_failed_bring_up(state, event)
        case Signalled():
            return _on_signal(state, event.signal, now)
        case Now.NODES_TOLD:
            return _on_told_nodes(state, now)
        case QueueAnswered():
            return _on_answer(state, event.left_s, now)
        case DriverStuck():
            return replace(state, stuck=event.why, kill_at=now + _STACKS_S), [Do.WRITE_STACKS]
        case ProcessLate():
            return replace(state, late=event.why, late_at=now), [NoteLate(event.why)]
        case NodesLost():
            return _on_lost_nodes(state, event, now)
        case DriverEnded():
            return _on_driver_end(state, event, now)
        case FormedAgain():
            return _on_formed_again(state, event)
        case Now.TICK:
            return _on_time(state, now)


def _on_failed_bring_up(state: State, event: BringUpFailed) -> Reaction:
    """End the attempt. If nodes were lost before, or may return, count the missing ones as lost and retry."""
    why = str(event.error)
    state = replace(state, lost={**state.lost, **dict.fromkeys(event.error.nodes, why)})
    if not (state.was_formed_again or event.may_come_back):
        return replace(state, phase="over"), [Fail(event.error)]
    code = EXIT_CRASH if state.was_formed_again else event.error.exit_code
    return _try_again_or_end(state, End("node_lost", code, why), event.facts)


def _on_signal(state: State, number: int, now: float) -> Reaction:
    """Forward the signal. SIGTERM and SIGHUP limit the driver's time. A signal to end in bring-up ends the attempt."""
    if number == signal.SIGUSR1:
        return state, [Forward(number)]
    if number == signal.SIGHUP and state.signalled:
        return state, []  # A closed terminal sends two signals: one from the kernel, one from its shell.
    # Save at once: SIGKILL may follow immediately.
    asked = signal.SIGTERM if number in END_SIGNALS else number  # the driver has no handler for SIGHUP
    actions: list[Action] = [Forward(asked), Do.SAVE_RECORD]
    if state.signalled:
        return replace(state, kill_at=now), actions
    name = signal.Signals(number).name
    state = replace(state, signalled=name)
    if state.phase == "bring_up":
        return replace(state, phase="over"), [*actions, Fail(EndAskedError(f"Ray is not up yet ({name})", state.step))]
    if asked != signal.SIGTERM:
        return state, actions
    return replace(state, kill_at=now + state.stop_grace_s), [*actions, Do.ASK_QUEUE]


def _on_told_nodes(state: State, now: float) -> Reaction:
    """Let the driver save, and keep the nodes. In a cancelled job, this process receives a signal too."""
    if state.signalled or state.told:
        return state, []
    state = replace(state, told="A signal told the nodes of this attempt to end.")
    actions: list[Action] = [Forward(signal.SIGTERM), Do.SAVE_RECORD]
    if state.phase == "bring_up":
        return replace(state, phase="over"), [*actions, Fail(LaunchError(f"{state.told} They were still coming up."))]
    return replace(state, kill_at=min(state.kill_at, now + state.stop_grace_s)), [*actions, Do.ASK_QUEUE]


def _on_answer(state: State, left_s: float | None, now: float) -> Reaction:
    """Preempted job: kill the driver shortly before the job's end. Cancelled job: order the agents to end at once."""
    if left_s is None:
        return state, [Do.LET_NODES_GO] if state.signalled else []
    told = f"The queue preempts this job, and takes its nodes in {left_s:.0f} s."
    state = replace(state, told=told, signalled="", kill_at=now + max(left_s - _TEARDOWN_S, 0.0))
    return state, [Do.SAVE_RECORD, Say(f"{told} The run is saved now.")]


def _on_lost_nodes(state: State, event: NodesLost, now: float) -> Reaction:
    """Record lost nodes. Learners run on all nodes, so the driver cannot continue and is ended."""
    new = {
        node: loss.why
        for node, loss in event.nodes.items()
        # In a cancelled job all nodes end. If Slurm ends the job for a lost node, that node was lost first.
        if node not in state.lost and (loss.is_machine or not (state.signalled or state.told))
    }
    if not new:
        return state, []
    kill_at = now + DRIVER_GRACE_S if state.kill_at == math.inf else state.kill_at
    state = replace(state, lost={**state.lost, **new}, kill_at=kill_at)
    actions: list[Action] = [Do.SAVE_RECORD, *(Say(f"Lost node {node}: {why}") for node, why in new.items())]
    if state.phase != "settling":
        return state, actions
    state, others = _settle(state)
    return state, [*actions, *others]


def _on_driver_end(state: State, ended: DriverEnded, now: float) -> Reaction:
    """Wait for reports of a lost node or a process stopped by SIGSTOP, unless the end is already explained."""
    explains = now - state.late_at <= _EXPLAINS_S
    state = replace(state, ended=ended, late=state.late if explains else "")
    if state.phase == "settling":
        return state, []  # The run directory's state after the wait decides.
    # Another process killed the driver, so no node or process is to blame for an error.
    was_killed = ended.returncode < 0 and not (state.stuck or state.late)
    is_plain = state.signalled or state.told or ended.returncode in (EXIT_COMPLETE, EXIT_RESUMABLE)
    if is_plain or was_killed or state.lost or state.phase == "bring_up":
        return _settle(state)
    return replace(state, phase="settling", settled_at=now + _SETTLE_S), [Do.NAME_STOPPED]


def _on_time(state: State, now: float) -> Reaction:
    if state.phase == "settling":
        return _settle(state) if now >= state.settled_at else (state, [])
    if now >= state.kill_at:
        return replace(state, kill_at=math.inf), [Say("The driver did not end in time; killing it."), Do.KILL_DRIVER]
    return state, []


def _settle(state: State) -> Reaction:
    """Decide how the driver ended, from the facts known now, and react."""
    assert state.ended is not None
    end = end_of_driver(state.ended, state.signalled, state.lost, state.told)
    if end.kind == "crash" and (why := state.stuck or state.late):
        end = replace(end, why=f"{why} The stacks of its processes are in {state.stacks_dir}.")
    return _try_again_or_end(state, end, state.ended.facts)


def _on_formed_again(state: State, event: FormedAgain) -> Reaction:
    assert state.ending is not None
    if not event.is_enough:
        end = state.ending
        if isinstance(event.error, EndAskedError):
            end = end_by_error(event.error, state.signalled)
            end = End("stopped", EXIT_RESUMABLE, end.why) if event.stop_asked else end
        elif event.error is not None:
            end = replace(end, code=event.error.exit_code, why=f"{end.why.rstrip('.')}. {event.error}")
        return replace(state, phase="over", lost={}), [end]
    return _restarted(replace(state, phase="bring_up", was_formed_again=True, lost={}), state.ending.why)


def _try_again_or_end(state: State, end: End, facts: RunFacts) -> Reaction:
    """Restart the driver if that may help; otherwise end the attempt as `end` says."""
    if end.kind in ("crash", "node_lost") and not (state.signalled or state.told or facts.stop_asked):
        stalled = 0 if facts.step > state.step else state.stalled.get(end.kind, 0) + 1
        if state.max_stalled > 0 and stalled <= state.max_stalled:
            state = replace(state, step=facts.step, stalled={**state.stalled, end.kind: stalled})
            if end.kind == "crash":
                return _restarted(state, end.why)
            return replace(state, phase="forming", ending=end), [Do.FORM_AGAIN]
    if end.kind == "resumable" and facts.stop_asked:
        why = "Stopped, as the STOP file asks; start the run again to resume."
        end = replace(end, kind="stopped", why=why)
    return replace(state, phase="over"), [end]


def _restarted(state: State, why: str) -> Reaction:
    if state.phase == "settling":
        state = replace(state, phase="training")
    return replace(state, stuck="", late="", kill_at=math.inf, ended=None), [StartDriver(why)]


def end_of_driver(ended: DriverEnded, signalled: str, lost: Mapping[str, str], told: str = "") -> End:
    """Return how a driver ended, and how its attempt ends unless the driver is restarted.

    `signalled` names the signal that the supervisor received, "" if none. `lost` maps nodes to the reason of their
    loss. `told` is the reason if the nodes were asked to end, "" if they were not.
    """
    returncode = ended.returncode
    if ended.facts.is_complete:  # Complete, even if the driver failed after that.
        return End("complete", EXIT_COMPLETE, "The run is complete.")
    if returncode == EXIT_RESUMABLE:
        why = f"{told} Stopped in time: the next job resumes the run." if told else ""
        return End("resumable", EXIT_RESUMABLE, why or "Stopped, incomplete; start the run again to resume.")
    if lost:
        named = "; ".join(f"{node}: {why}" for node, why in lost.items())
        return End("node_lost", EXIT_CRASH, f"Lost {len(lost)} node(s) while training. {named}")
    if returncode == EXIT_UNAVAILABLE:
        return End("node_lost", EXIT_CRASH, "A node of the attempt is gone from Ray; see driver.log.")
    said = f": {ended.last_error}; see driver.log." if ended.last_error else "; see driver.log."
    if returncode == EXIT_CONFIG:
        return End("config", EXIT_CONFIG, f"Something must be changed first{said}")
    if told:
        return End("crash", EXIT_CRASH, f"{told} The driver wrote no checkpoint in that time; see driver.log.")
    if signalled:
        return End("cancelled", EXIT_CRASH, f"Ended by {signalled}, sent to the supervisor.")
    if returncode == EXIT_COMPLETE:
        return End("crash", EXIT_CRASH, "The driver exited with 0 but wrote no COMPLETE: it ended without finishing.")
    if returncode < 0:
        name = signal_name(-returncode)
        if name == "SIGKILL":  # a killed process prints no error
            said = " (often the kernel, out of memory); see driver.log."
        return End("crash", 128 - returncode, f"The driver was killed by {name}{said}")
    return End("crash", returncode, f"The driver crashed with exit code {returncode}{said}")


def end_by_error(error: BaseException, signalled: str) -> End:
    if not isinstance(error, HpcGrpoError):
        return End("crash", EXIT_CRASH, f"The supervisor failed: {error!r}")
    if isinstance(error, EndAskedError):
        kind: ExitKind = "resumable" if error.exit_code == EXIT_RESUMABLE else "cancelled"
        return End(kind, error.exit_code, str(error))
    if signalled:
        return End("cancelled", error.exit_code, str(error))
    return End("config" if isinstance(error, ConfigError) else "bringup_failed", error.exit_code, str(error))
