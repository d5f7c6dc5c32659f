"""What the supervisor does about what happens, as a table: given a state and an event, the actions that must come."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.errors import ConfigError, EndAskedError, LaunchError, NodesUnavailableError
from hpc_grpo.launch.supervisor.transitions import (
    Action,
    BringUpFailed,
    Do,
    DriverEnded,
    DriverStuck,
    End,
    Event,
    Fail,
    FormedAgain,
    Forward,
    Loss,
    NodesLost,
    Now,
    ProcessLate,
    QueueAnswered,
    RunFacts,
    Say,
    Signalled,
    StartDriver,
    State,
    end_by_error,
    end_of_driver,
    react,
)

NOW = 1000.0
CRASHED = "The driver crashed with exit code 3; see driver.log."
RAY_ENDED = "Ray ended by itself"

BRING_UP = State(max_stalled=2, stacks_dir=Path("/attempt/stacks"), stop_grace_s=60.0, step=10)
TRAINING = replace(BRING_UP, phase="training")
UNHURRIED = replace(TRAINING, stop_grace_s=math.inf)
TOLD_TO_END = replace(TRAINING, signalled="SIGTERM", kill_at=NOW + 60)
PREEMPTED = replace(TRAINING, told="The queue preempts this job.", kill_at=NOW + 20)
LOST = replace(TRAINING, lost={"n2": RAY_ENDED}, kill_at=NOW + 10)
SETTLING = replace(TRAINING, phase="settling", settled_at=NOW + 3, ended=DriverEnded(3, RunFacts(10)))
FORMED_AGAIN = replace(BRING_UP, was_formed_again=True)
FORMING = replace(TRAINING, phase="forming", ending=End("node_lost", 1, "n2 is gone."), lost={"n2": "gone"})
NOT_IN_RAY = NodesUnavailableError("After 300 s not in Ray: n2.", ["n2"])


def ended(returncode: int, step: int = 10, **facts: bool) -> DriverEnded:
    return DriverEnded(returncode, RunFacts(step, **facts))


def losses(why: str = RAY_ENDED, is_machine: bool = False) -> NodesLost:
    return NodesLost({"n2": Loss(why, is_machine)})


def named(actions: list[Action]) -> list[str]:
    """The actions without their texts, as a row of the table shows them."""
    words = {Do: lambda a: a.name, Forward: lambda a: signal.Signals(a.signal).name, End: lambda a: f"End {a.kind}"}
    return [words.get(type(action), lambda a: type(a).__name__)(action) for action in actions]


@pytest.mark.parametrize(
    ("state", "event", "actions", "phase"),
    [
        pytest.param(BRING_UP, Now.RAY_READY, "PUBLISH_RAY", "training", id="all nodes in Ray"),
        pytest.param(BRING_UP, BringUpFailed(NOT_IN_RAY), "Fail", "over", id="nodes that never came up"),
        pytest.param(BRING_UP, Signalled(signal.SIGTERM), "SIGTERM SAVE_RECORD Fail", "over", id="ended in bring-up"),
        pytest.param(BRING_UP, ended(78), "End config", "over", id="inputs refused while Ray comes up"),
        pytest.param(BRING_UP, ended(3), "StartDriver", "bring_up", id="crash while Ray comes up"),
        pytest.param(BRING_UP, Signalled(signal.SIGUSR1), "SIGUSR1", "bring_up", id="warning in bring-up"),
        # The end of walltime.
        pytest.param(TRAINING, Signalled(signal.SIGUSR1), "SIGUSR1", "training", id="warning of walltime's end"),
        pytest.param(TRAINING, ended(75), "End resumable", "over", id="checkpointed in time"),
        pytest.param(TRAINING, ended(75, stop_asked=True), "End stopped", "over", id="STOP file"),
        pytest.param(
            TRAINING, Signalled(signal.SIGTERM), "SIGTERM SAVE_RECORD ASK_QUEUE", "training", id="asked to end"
        ),
        pytest.param(
            TRAINING, Signalled(signal.SIGHUP), "SIGTERM SAVE_RECORD ASK_QUEUE", "training", id="a terminal is gone"
        ),
        pytest.param(BRING_UP, Signalled(signal.SIGHUP), "SIGTERM SAVE_RECORD Fail", "over", id="gone in bring-up"),
        # Preemption, and a cancel that looks like it at first.
        pytest.param(TRAINING, Now.NODES_TOLD, "SIGTERM SAVE_RECORD ASK_QUEUE", "training", id="nodes told to end"),
        pytest.param(PREEMPTED, Now.NODES_TOLD, "", "training", id="one node after the other is told"),
        pytest.param(TOLD_TO_END, Now.NODES_TOLD, "", "training", id="nodes of a job that is told to end"),
        pytest.param(TRAINING, QueueAnswered(30.0), "SAVE_RECORD Say", "training", id="preempted"),
        pytest.param(TOLD_TO_END, QueueAnswered(30.0), "SAVE_RECORD Say", "training", id="in a step too"),
        pytest.param(TOLD_TO_END, QueueAnswered(None), "LET_NODES_GO", "training", id="cancelled"),
        pytest.param(PREEMPTED, QueueAnswered(None), "", "training", id="told by somebody, and the job goes on"),
        pytest.param(
            PREEMPTED, Signalled(signal.SIGTERM), "SIGTERM SAVE_RECORD ASK_QUEUE", "training", id="then cancelled"
        ),
        pytest.param(PREEMPTED, ended(75), "End resumable", "over", id="preempted, checkpointed"),
        pytest.param(PREEMPTED, ended(-9), "End crash", "over", id="preempted, no checkpoint"),
        pytest.param(PREEMPTED, losses(), "", "training", id="nodes of a preempted job end"),
        pytest.param(BRING_UP, Now.NODES_TOLD, "SIGTERM SAVE_RECORD Fail", "over", id="preempted in bring-up"),
        pytest.param(TOLD_TO_END, ended(75), "End resumable", "over", id="asked to end, checkpointed"),
        pytest.param(TOLD_TO_END, ended(-15), "End cancelled", "over", id="asked to end, no checkpoint"),
        pytest.param(TOLD_TO_END, Signalled(signal.SIGINT), "SIGINT SAVE_RECORD", "training", id="asked twice"),
        # A driver that ends.
        pytest.param(TRAINING, ended(0, is_complete=True), "End complete", "over", id="complete"),
        pytest.param(TRAINING, ended(0), "StartDriver", "training", id="ended without COMPLETE"),
        pytest.param(TRAINING, ended(3), "NAME_STOPPED", "settling", id="crash waits for the word of a node"),
        pytest.param(TRAINING, ended(-9), "StartDriver", "training", id="a driver that was killed blames nobody"),
        pytest.param(SETTLING, Now.TICK, "", "settling", id="not settled yet"),
        pytest.param(replace(SETTLING, settled_at=NOW), Now.TICK, "StartDriver", "training", id="crash, settled"),
        pytest.param(SETTLING, losses(), "SAVE_RECORD Say FORM_AGAIN", "forming", id="a lost node explains the crash"),
        # A node that is lost.
        pytest.param(TRAINING, losses(), "SAVE_RECORD Say", "training", id="lost node: the driver gets a moment"),
        pytest.param(LOST, losses(), "", "training", id="a lost node is told once"),
        pytest.param(LOST, ended(-9), "FORM_AGAIN", "forming", id="lost node, driver ended"),
        pytest.param(TOLD_TO_END, losses(), "", "training", id="nodes of a cancelled job end"),
        pytest.param(TOLD_TO_END, losses(is_machine=True), "SAVE_RECORD Say", "training", id="job ended for its node"),
        pytest.param(TRAINING, ended(69), "NAME_STOPPED", "settling", id="the driver misses a node"),
        pytest.param(FORMING, FormedAgain(is_enough=True), "StartDriver", "bring_up", id="formed again"),
        pytest.param(FORMING, FormedAgain(is_enough=False), "End node_lost", "over", id="too few nodes answer"),
        pytest.param(
            BRING_UP, BringUpFailed(NOT_IN_RAY, may_come_back=True), "FORM_AGAIN", "forming", id="awaited in bring-up"
        ),
        pytest.param(
            replace(BRING_UP, max_stalled=0),
            BringUpFailed(NOT_IN_RAY, may_come_back=True),
            "End node_lost",
            "over",
            id="or not, where nothing is tried again",
        ),
        pytest.param(FORMING, FormedAgain(False, EndAskedError("n2", 10)), "End resumable", "over", id="told to end"),
        pytest.param(FORMING, FormedAgain(False, EndAskedError("n2", 0)), "End cancelled", "over", id="with no step"),
        pytest.param(
            FORMING, FormedAgain(False, EndAskedError("n2", 0), stop_asked=True), "End stopped", "over", id="STOP, then"
        ),
        pytest.param(FORMED_AGAIN, BringUpFailed(NOT_IN_RAY), "FORM_AGAIN", "forming", id="another node is lost"),
        # A driver that is stuck, or does not end.
        pytest.param(TRAINING, DriverStuck("It hangs."), "WRITE_STACKS", "training", id="stuck"),
        pytest.param(TRAINING, ProcessLate("It hangs."), "NoteLate", "training", id="an actor is late"),
        pytest.param(replace(TRAINING, kill_at=NOW), Now.TICK, "Say KILL_DRIVER", "training", id="out of time"),
        pytest.param(LOST, Now.TICK, "", "training", id="still has time"),
    ],
)
def test_what_happens_leads_to_actions(state: State, event: Event, actions: str, phase: str) -> None:
    following, done = react(state, event, NOW)
    assert (" ".join(named(done)), following.phase) == (actions, phase)


@pytest.mark.parametrize(
    ("state", "event", "seconds"),
    [
        pytest.param(TRAINING, Signalled(signal.SIGTERM), 60.0, id="SIGTERM, behind which SIGKILL waits"),
        pytest.param(UNHURRIED, Signalled(signal.SIGTERM), math.inf, id="SIGTERM where nobody is in a hurry"),
        pytest.param(UNHURRIED, Signalled(signal.SIGHUP), math.inf, id="a terminal that is gone"),
        pytest.param(UNHURRIED, Now.NODES_TOLD, math.inf, id="nodes told to end where nobody is in a hurry"),
        pytest.param(TOLD_TO_END, Signalled(signal.SIGHUP), 60.0, id="a hangup is told twice, and asks once"),
        pytest.param(TRAINING, Now.NODES_TOLD, 60.0, id="nodes told to end, perhaps by a cancel"),
        pytest.param(TRAINING, QueueAnswered(300.0), 290.0, id="a preempted job has what the queue says"),
        pytest.param(TRAINING, QueueAnswered(3.0), 0.0, id="or nothing"),
        pytest.param(TRAINING, Signalled(signal.SIGINT), math.inf, id="Ctrl+C: as long as it needs"),
        pytest.param(TOLD_TO_END, Signalled(signal.SIGINT), 0.0, id="the second signal ends it at once"),
        pytest.param(TRAINING, Signalled(signal.SIGUSR1), math.inf, id="a warning"),
        pytest.param(TRAINING, DriverStuck("It hangs."), 5.0, id="the stacks must be written first"),
        pytest.param(TRAINING, losses(), 10.0, id="a lost node"),
        pytest.param(LOST, NodesLost({"n3": Loss("gone")}), 10.0, id="a further one gives no more time"),
        pytest.param(TOLD_TO_END, losses(is_machine=True), 60.0, id="a lost node takes no time from a checkpoint"),
    ],
)
def test_how_long_a_driver_has_until_it_is_killed(state: State, event: Event, seconds: float) -> None:
    assert react(state, event, NOW)[0].kill_at == NOW + seconds


def test_a_driver_that_is_out_of_time_is_killed_once() -> None:
    state, actions = react(replace(TRAINING, kill_at=NOW), Now.TICK, NOW)
    assert Do.KILL_DRIVER in actions
    assert react(state, Now.TICK, NOW + 1)[1] == []


def after(state: State, *events: Event) -> tuple[State, list[Action]]:
    """React to events 10 s apart, so that each driver's end is settled by the next Tick."""
    actions: list[Action] = []
    for index, event in enumerate(events):
        state, actions = react(state, event, NOW + 10.0 * index)
    return state, actions


@pytest.mark.parametrize(
    ("steps", "restarts"),
    [
        ([10, 10, 10], [True, True, False]),  # no new checkpoint: twice, as max_stalled = 2 allows
        ([10, 12, 12, 12, 12], [True, True, True, True, False]),  # a checkpoint starts the count anew
    ],
)
def test_a_driver_is_started_again_as_long_as_that_leads_somewhere(steps: list[int], restarts: list[bool]) -> None:
    state, came = TRAINING, []
    for step in steps:
        state, actions = after(state, ended(3, step), Now.TICK)
        came.append(actions == [StartDriver(CRASHED)])
    assert came == restarts
    assert actions == [End("crash", 3, CRASHED)]


def test_crashes_and_lost_nodes_are_counted_apart() -> None:
    state, _ = after(TRAINING, ended(3), Now.TICK, ended(3), Now.TICK)
    assert react(replace(state, lost={"n2": "gone"}), ended(-9), NOW)[1] == [Do.FORM_AGAIN]


@pytest.mark.parametrize(
    ("state", "event"),
    [
        pytest.param(replace(TRAINING, max_stalled=0), ended(3), id="a user sits before it"),
        pytest.param(TRAINING, ended(3, stop_asked=True), id="the STOP file asks for the end"),
        pytest.param(TOLD_TO_END, ended(3), id="it was told to end"),
        pytest.param(replace(TRAINING, max_stalled=0), ended(3, step=11), id="progress does not make up for that"),
    ],
)
def test_a_driver_is_not_started_again(state: State, event: Event) -> None:
    _, (end,) = after(state, event, Now.TICK) if not state.signalled else react(state, event, NOW)
    assert isinstance(end, End)


def test_a_restarted_driver_begins_without_what_the_one_before_left() -> None:
    state, _ = react(TRAINING, DriverStuck("It hangs."), NOW)
    state, actions = after(state, ended(-9), Now.TICK)
    assert actions == [StartDriver("It hangs. The stacks of its processes are in /attempt/stacks.")]
    assert (state.stuck, state.kill_at, state.ended) == ("", math.inf, None)


def test_nodes_formed_again_begin_without_the_losses_before() -> None:
    state, actions = react(FORMING, FormedAgain(is_enough=True), NOW)
    assert actions == [StartDriver("n2 is gone.")]
    assert (state.lost, state.was_formed_again) == ({}, True)


def test_nodes_that_do_not_come_up_again_are_lost_ones() -> None:
    state, _ = react(FORMED_AGAIN, BringUpFailed(NOT_IN_RAY, RunFacts(10)), NOW)
    assert state.lost == {"n2": "After 300 s not in Ray: n2."}
    assert react(state, FormedAgain(is_enough=False), NOW)[1] == [End("node_lost", 1, "After 300 s not in Ray: n2.")]


def test_every_lost_node_is_named_with_its_reason() -> None:
    both = NodesLost({"n2": Loss("its agent ended"), "n3": Loss("no heartbeat")})
    state, actions = react(SETTLING, both, NOW)
    assert actions[1:3] == [Say("Lost node n2: its agent ended"), Say("Lost node n3: no heartbeat")]
    assert state.ending is not None
    assert state.ending.why == "Lost 2 node(s) while training. n2: its agent ended; n3: no heartbeat"


@pytest.mark.parametrize(("state", "step", "code"), [(BRING_UP, 10, 75), (FORMED_AGAIN, 10, 75), (BRING_UP, 0, 1)])
def test_a_signal_while_the_nodes_come_up_ends_as_the_checkpoint_there_is(state: State, step: int, code: int) -> None:
    _, actions = react(replace(state, step=step), Signalled(signal.SIGINT), NOW)
    assert isinstance(actions[-1], Fail)
    assert actions[-1].error.exit_code == code
    assert "Ray is not up yet (SIGINT)" in str(actions[-1].error)


@pytest.mark.parametrize(("seconds", "explains"), [(10.0, True), (3600.0, False)])
def test_a_process_that_was_late_explains_a_crash_soon_after(seconds: float, explains: bool) -> None:
    state, _ = react(TRAINING, ProcessLate("The learner (process 7) was stopped."), NOW)
    state, _ = react(state, ended(1), NOW + seconds)
    _, (restart,) = react(state, Now.TICK, NOW + seconds + 5.0)
    assert isinstance(restart, StartDriver)
    assert ("The learner (process 7) was stopped." in restart.why) == explains


def test_a_process_that_is_named_while_a_crash_settles_explains_it() -> None:
    """Ray's own connection check may end the driver before a learner has been stopped for long."""
    state, _ = react(TRAINING, ended(1), NOW)
    state, _ = react(state, ProcessLate("The learner (process 7) was stopped."), NOW + 1.0)
    _, (restart,) = react(state, Now.TICK, NOW + 3.0)
    assert isinstance(restart, StartDriver)
    assert "The learner (process 7) was stopped." in restart.why


@pytest.mark.parametrize(
    ("returncode", "complete", "signalled", "lost", "kind", "code"),
    [
        (0, True, "", {}, "complete", 0),
        (-9, True, "", {"n2": "Ray ended"}, "complete", 0),
        (0, False, "", {}, "crash", 1),
        (75, False, "", {}, "resumable", 75),
        (75, False, "SIGTERM", {}, "resumable", 75),
        (78, False, "", {}, "config", 78),
        (1, False, "SIGINT", {}, "cancelled", 1),
        (1, False, "", {"n2": "Ray ended"}, "node_lost", 1),
        (69, False, "", {}, "node_lost", 1),
        (78, False, "", {"n2": "Ray ended"}, "node_lost", 1),
        (3, False, "", {}, "crash", 3),
        (-9, False, "", {}, "crash", 137),
    ],
)
def test_how_a_driver_ended(
    returncode: int, complete: bool, signalled: str, lost: dict[str, str], kind: str, code: int
) -> None:
    end = end_of_driver(DriverEnded(returncode, RunFacts(10, is_complete=complete)), signalled, lost)
    assert (end.kind, end.code) == (kind, code)


@pytest.mark.parametrize(
    ("returncode", "why"),
    [
        (3, "The driver crashed with exit code 3: KeyError: 'x'; see driver.log."),
        (78, "Something must be changed first: KeyError: 'x'; see driver.log."),
        (-127, "The driver was killed by signal 127: KeyError: 'x'; see driver.log."),
        (-6, "The driver was killed by SIGABRT: KeyError: 'x'; see driver.log."),
        (-9, "The driver was killed by SIGKILL (often the kernel, out of memory); see driver.log."),
        (75, "Stopped, incomplete; start the run again to resume."),
        (0, "The driver exited with 0 but wrote no COMPLETE: it ended without finishing."),
    ],
)
def test_the_drivers_last_error_is_told_where_it_is_the_cause(returncode: int, why: str) -> None:
    assert end_of_driver(DriverEnded(returncode, last_error="KeyError: 'x'"), "", {}).why == why


@pytest.mark.parametrize(
    ("error", "signalled", "kind", "code"),
    [
        (NOT_IN_RAY, "", "bringup_failed", 69),
        (ConfigError("launch.env.X: LOCALDIR is not set."), "", "config", 78),
        (LaunchError("SIGTERM while the nodes were coming up."), "SIGTERM", "cancelled", 1),
        (KeyError("x"), "", "crash", 1),
    ],
)
def test_how_an_attempt_ended_whose_supervisor_failed(error: Any, signalled: str, kind: str, code: int) -> None:
    end = end_by_error(error, signalled)
    assert (end.kind, end.code) == (kind, code)
