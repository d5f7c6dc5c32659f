"""The supervisor: owns one attempt from the first process to the last.

Consumes an `AttemptSetup`; has Ray brought up on the nodes, runs the driver, again where it ended and that may help,
tears down what it started, and records the attempt. `Supervisor` observes what happens, `transitions.react` decides
what comes of it, `Processes` (processes.py) does that. It waits in one place, `Processes.wait`, on everything at once:
nodes, the driver's output, signals.

Runs in the main thread only, because the kernel ties a child's parent-death signal to the thread that started it.
Where the run directory stalls it waits for that too; only the heartbeats of the nodes go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hpc_grpo.launch.supervisor import events
from hpc_grpo.launch.supervisor.attempt_setup import AttemptSetup
from hpc_grpo.launch.supervisor.endings import end_by_error
from hpc_grpo.launch.supervisor.events import Event, RunFacts
from hpc_grpo.launch.supervisor.nodes import Nodes
from hpc_grpo.launch.supervisor.processes import Processes
from hpc_grpo.launch.supervisor.transitions import State, react
from hpc_grpo.run.checkpoint import newest_step
from hpc_grpo.run.files import when_there_is_space
from hpc_grpo.run.last_error import last_error_in_a_line
from hpc_grpo.run.stacks import STACKS_NAME
from hpc_grpo.system.processes import adopt_orphans
from hpc_grpo.system.readable import counted
from hpc_grpo.system.say import say
from hpc_grpo.system.signals import Signals

_LOOK_S = 1.0


class Supervisor:
    """Sees an attempt through. `chore` is called about every second, from the driver's start to its end."""

    def __init__(self, setup: AttemptSetup, nodes: Nodes, driver_command: Sequence[str]) -> None:
        self._run, self._dir = setup.run, setup.dir
        self._signals = Signals()
        self._next_look = 0.0
        step = newest_step(setup.run)
        grace_s = setup.place.stop_grace_s
        self._state = State(setup.max_stalled_restarts, setup.dir / STACKS_NAME, grace_s, step=step)
        self.chore: Callable[[], None] = lambda: None
        self.record = setup.new_record(first_step=step)
        self._processes = Processes(setup, nodes, driver_command, self.record)
        self._processes.goes_on = lambda: not (self._signals.pending or setup.run.stop_marker.exists())

    def run(self) -> int:
        """Run the attempt and return the exit code to end with. Raises HpcGrpoError if Ray did not come up."""
        adopt_orphans()
        when_there_is_space(lambda: self._dir.mkdir(parents=True, exist_ok=True), "the attempt's folder")
        self.record.save(self._dir)
        # The owner of the lock before may have saved while it was waited for.
        self._state = replace(self._state, step=newest_step(self._run))
        say(f"Attempt {self.record.attempt} of run {self._run.path.name} on {counted(len(self.record.nodes), 'node')}")
        with self._signals:
            try:
                self._processes.start()
                code = self._see_it_through()
            except BaseException as error:
                # Whatever it is: recorded, since nobody may have watched, and raised again.
                end = end_by_error(error, self._state.signalled)
                self.record.end(end.kind, end.code, end.why)
                raise
            finally:
                self._processes.tear_down()
                self.record.save(self._dir)
        say(self.record.why)
        return code

    def _see_it_through(self) -> int:
        """Turn the loop until the attempt is over; returns its exit code."""
        while not self._state.is_over:
            self._processes.wait()
            for event in self._what_happened():
                self._handle(event)
                if self._state.is_over:
                    break
        assert self.record.exit_code is not None
        return self.record.exit_code

    def _what_happened(self) -> Iterator[Event]:
        """Yield what there is to react to. One at a time, since what one leads to may overtake the next."""
        processes = self._processes
        if self._state.phase == "bring_up" and processes.nodes.is_ready:
            yield events.RayReady()
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_S
            if (why := processes.driver.why_late()) and not self._state.stuck:
                yield events.DriverStuck(why)
            self.chore()
        for why in processes.nodes.take_late():
            yield events.ProcessLate(why)
        if self._signals.resized:
            self._signals.resized = False
            processes.driver.copy_window_size()
        while self._signals.pending:
            yield events.Signalled(self._signals.pending.pop(0))
        if processes.nodes.told():
            yield events.NodesTold()
        if self._state.phase == "bring_up":
            if error := processes.nodes.bring_up_error():
                yield events.BringUpFailed(error, self._facts(), processes.nodes.lost_may_come_back())
        elif lost := processes.nodes.lost():
            yield events.NodesLost(lost)
        returncode = processes.driver.program.poll()
        if returncode is not None:
            processes.driver.pump()
            yield events.DriverEnded(returncode, self._facts(), last_error_in_a_line(processes.driver.printed))
        yield events.Tick()

    def _handle(self, event: Event) -> None:
        self._state, actions = react(self._state, event, time.monotonic())
        if self._state.signalled and not self.record.signalled:
            self.record.signalled, self.record.signalled_at = self._state.signalled, time.time()
        self.record.stuck = self._state.stuck
        self.record.lost_nodes |= self._state.lost
        for action in actions:
            if outcome := self._processes.perform(action):
                self._handle(outcome)

    def _facts(self) -> RunFacts:
        run = self._run
        return RunFacts(newest_step(run), is_complete=run.is_complete(), stop_asked=run.stop_marker.exists())
