"""Decide what the supervisor does about what happens to an attempt: a pure function of state and event.

`react(state, event, now)` returns the next state and the actions to perform, in order. Nothing here waits, reads a
file or starts a process: `supervisor.py` observes the events and performs the actions.

    phase     event               actions, in order                                     next phase
    --------  ------------------  ----------------------------------------------------  -------------------
    bring_up  RAY_READY           PUBLISH_RAY                                           training
    bring_up  BringUpFailed       Fail; with nodes lost before, or that may come back,  over
                                  as lost nodes (below)
    bring_up  asked to end        Forward, SAVE_RECORD, Fail; of NODES_TOLD too         over
    training  asked to end        Forward, SAVE_RECORD; of SIGTERM and SIGHUP           training
                                  ASK_QUEUE, and KILL_DRIVER after the place's grace
    training  NODES_TOLD          Forward, SAVE_RECORD, ASK_QUEUE; KILL_DRIVER as then  training
    training  it is preempted     KILL_DRIVER shortly before its end                    training
    training  it is cancelled     LET_NODES_GO                                          training
    training  asked to end again  Forward, SAVE_RECORD; KILL_DRIVER now                 training
    training  NodesLost           SAVE_RECORD, Say; KILL_DRIVER in 10 s                 training
    bring_up  DriverEnded         as the driver ended (below)                           see below
    training  DriverEnded         the same; of an error NAME_STOPPED, and that after    settling
                                  3 s: a node may be lost, a process stopped
    settling  3 s, NodesLost      as the driver ended (below)                           see below
    any       SIGUSR1             Forward: walltime ends, the driver checkpoints        the same
    any       DriverStuck         WRITE_STACKS; KILL_DRIVER in 5 s                      the same
    any       ProcessLate         NoteLate: the driver replaces it, or ends with it     the same

    how the driver ended         where another try may help                             else
    ---------------------------  -----------------------------------------------------  -----------------
    complete, resumable, config  -                                                      End
    crash                        StartDriver, on the nodes as they are                  End
    lost nodes                   FORM_AGAIN, then of FormedAgain StartDriver or End     End

Another try may help unless the end was asked for, by a signal, preemption or the STOP file, and as long as no more than
one try in a row brought no new checkpoint; crashes and losses count apart.
"""

from __future__ import annotations

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
)
from hpc_grpo.launch.place.base import End
from hpc_grpo.launch.supervisor import events
from hpc_grpo.launch.supervisor.events import Action, Do, Event, Fail, Forward, RunFacts, Say, StartDriver
from hpc_grpo.run.attempt import ExitKind
from hpc_grpo.system.signals import END_SIGNALS, signal_name

DRIVER_GRACE_S = 10.0
_SETTLE_S = 3.0  # a driver may have ended for a node or a process that did not, whose agent needs a moment to tell
_STACKS_S = 5.0  # time for processes to write their stacks
_EXPLAINS_S = 60.0  # a driver that crashes so soon after a process was ended that was late did so for want of it
_TEARDOWN_S = 10.0  # kept of what a preempted job has left, for its nodes


@dataclass(frozen=True)
class State:
    """All that a reaction depends on besides the event. Times are those of `time.monotonic()`.

    `step`: the newest checkpoint when the driver last started. `stop_grace_s`: the place's. A driver has so long for
    its checkpoint after SIGTERM or SIGHUP, and no limit after Ctrl+C; a second signal ends it at once. `signalled`: the
    signal that asked this process to end. `told`: why its nodes alone were, by preemption say. `lost`: node -> why, of
    the present nodes. `stalled`: tries in a row without a new checkpoint, by how the driver ended. `late`: why the last
    process was ended that was late, at `late_at`. `ended`: the driver's end, while settling. `ending`: how the attempt
    ends if FORM_AGAIN finds too few nodes.
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
    ended: events.DriverEnded | None = None
    ending: End | None = None

    @property
    def is_over(self) -> bool:
        return self.phase == "over"


Reaction = tuple[State, list[Action]]


def react(state: State, event: Event, now: float) -> Reaction:
    match event:
        case events.Now.RAY_READY:
            return replace(state, phase="training"), [Do.PUBLISH_RAY]
        case events.BringUpFailed():
            return _on_failed_bring_up(state, event)
        case events.Signalled():
            return _on_signal(state, event.signal, now)
        case events.Now.NODES_TOLD:
            return _on_told_nodes(state, now)
        case events.QueueAnswered():
            return _on_answer(state, event.left_s, now)
        case events.DriverStuck():
            return replace(state, stuck=event.why, kill_at=now + _STACKS_S), [Do.WRITE_STACKS]
        case events.ProcessLate():
            return replace(state, late=event.why, late_at=now), [events.NoteLate(event.why)]
        case events.NodesLost():
            return _on_lost_nodes(state, event, now)
        case events.DriverEnded():
            return _on_driver_end(state, event, now)
        case events.FormedAgain():
            return _on_formed_again(state, event)
        case events.Now.TICK:
            return _on_time(state, now)


def _on_failed_bring_up(state: State, event: events.BringUpFailed) -> Reaction:
    """End the attempt; where nodes were lost before, or may come back, count the missing as lost and try again."""
    why = str(event.error)
    state = replace(state, lost={**state.lost, **dict.fromkeys(event.error.nodes, why)})
    if not (state.was_formed_again or event.may_come_back):
        return replace(state, phase="over"), [Fail(event.error)]
    code = EXIT_CRASH if state.was_formed_again else event.error.exit_code
    return _try_again_or_end(state, End("node_lost", code, why), event.facts)


def _on_signal(state: State, number: int, now: float) -> Reaction:
    """Pass the signal on. One that asks for the end limits the driver's time; before training it ends the attempt."""
    if number == signal.SIGUSR1:
        return state, [Forward(number)]
    if number == signal.SIGHUP and state.signalled:
        return state, []  # a terminal that is gone tells twice: by the kernel, and by its shell
    # Saved at once, since SIGKILL may follow before anything else is said.
    asked = signal.SIGTERM if number in END_SIGNALS else number  # a driver takes a hangup for nothing
    actions: list[Action] = [Forward(asked), Do.SAVE_RECORD]
    if state.signalled:
        return replace(state, kill_at=now), actions
    if asked == signal.SIGTERM and state.phase != "bring_up":
        actions.append(Do.ASK_QUEUE)
    name = signal.Signals(number).name
    kill_at = now + state.stop_grace_s if asked == signal.SIGTERM else state.kill_at
    state = replace(state, signalled=name, kill_at=kill_at)
    if state.phase == "bring_up":
        return replace(state, phase="over"), [*actions, Fail(EndAskedError(f"Ray is not up yet ({name})", state.step))]
    return state, actions


def _on_told_nodes(state: State, now: float) -> Reaction:
    """Have the run saved, while the nodes stay: of a cancelled job this process is signalled too."""
    if state.signalled or state.told:
        return state, []
    state = replace(state, told="A signal told the nodes of this attempt to end.")
    actions: list[Action] = [Forward(signal.SIGTERM), Do.SAVE_RECORD]
    if state.phase == "bring_up":
        return replace(state, phase="over"), [*actions, Fail(LaunchError(f"{state.told} They were still coming up."))]
    return replace(state, kill_at=min(state.kill_at, now + state.stop_grace_s)), [*actions, Do.ASK_QUEUE]


def _on_answer(state: State, left_s: float | None, now: float) -> Reaction:
    """Give the driver what a preempted job has left; of one that is cancelled have the nodes end while they can."""
    if left_s is None:
        return state, [Do.LET_NODES_GO] if state.signalled else []
    told = f"The queue preempts this job, {left_s:.0f} s before it takes the nodes."
    state = replace(state, told=told, signalled="", kill_at=now + max(left_s - _TEARDOWN_S, 0.0))
    return state, [Do.SAVE_RECORD, Say(f"{told} The run is saved now.")]


def _on_lost_nodes(state: State, event: events.NodesLost, now: float) -> Reaction:
    """Note nodes that are gone. Learners are on all of them, so the driver cannot go on and is ended."""
    new = {
        node: loss.why
        for node, loss in event.nodes.items()
        # Of a job that is cancelled all nodes end; of one that Slurm ends for a lost node, this one came first.
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


def _on_driver_end(state: State, ended: events.DriverEnded, now: float) -> Reaction:
    """Give a lost node or a stopped process a moment to be known, unless the end needs no such explanation."""
    explains = now - state.late_at <= _EXPLAINS_S
    state = replace(state, ended=ended, late=state.late if explains else "")
    if state.phase == "settling":
        return state, []  # what the run directory says by the end of it counts
    # One that somebody else killed has met no error for which a node or a process could be to blame.
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
    """Conclude from what is known now how the driver ended."""
    assert state.ended is not None
    end = end_of_driver(state.ended, state.signalled, state.lost, state.told)
    if end.kind == "crash" and (why := state.stuck or state.late):
        end = replace(end, why=f"{why} The stacks of its processes are in {state.stacks_dir}.")
    return _try_again_or_end(state, end, state.ended.facts)


def _on_formed_again(state: State, event: events.FormedAgain) -> Reaction:
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
    """Start the driver again where that may help, else end the attempt as `end` says."""
    if end.kind in ("crash", "node_lost") and not (state.signalled or state.told or facts.stop_asked):
        stalled = 0 if facts.step > state.step else state.stalled.get(end.kind, 0) + 1
        if state.max_stalled > 0 and stalled <= state.max_stalled:
            state = replace(state, step=facts.step, stalled={**state.stalled, end.kind: stalled})
            if end.kind == "crash":
                return _restarted(state, end.why)
            return replace(state, phase="forming", ending=end), [Do.FORM_AGAIN]
    if end.kind == "resumable" and facts.stop_asked:
        why = "Stopped and checkpointed, as the STOP file asks; hpc-grpo submit takes it up again."
        end = replace(end, kind="stopped", why=why)
    return replace(state, phase="over"), [end]


def _restarted(state: State, why: str) -> Reaction:
    if state.phase == "settling":
        state = replace(state, phase="training")
    return replace(state, stuck="", late="", kill_at=math.inf, ended=None), [StartDriver(why)]


def end_of_driver(ended: events.DriverEnded, signalled: str, lost: Mapping[str, str], told: str = "") -> End:
    """Return how a driver ended, and how its attempt ends unless it is started again.

    `signalled` names the signal that the supervisor was sent, "" if none; `lost` maps nodes to why they are gone;
    `told` says why the nodes were told to end, "" if they were not.
    """
    returncode = ended.returncode
    if ended.facts.is_complete:  # whatever became of its driver after that
        return End("complete", EXIT_COMPLETE, "The run is complete.")
    if returncode == EXIT_RESUMABLE:
        why = f"{told} Checkpointed in time: the next job carries on." if told else ""
        return End("resumable", EXIT_RESUMABLE, why or "Checkpointed with more to do; start it again to carry on.")
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
        if name == "SIGKILL":  # which no process lives to say
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
