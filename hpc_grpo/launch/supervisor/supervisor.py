"""The supervisor: manages one attempt from the first process to the last.

Takes an `AttemptSetup`. It starts Ray on the nodes, runs the driver and restarts it if that may help, tears down what
it started, and records the attempt. `Supervisor` observes events, `transitions.react` decides the actions, `Processes`
performs them. It waits at one place, `Processes.wait`, for everything: nodes, the driver's output, signals.

Runs in the main thread only, because the kernel ties a child's parent-death signal to the thread that started it. If
the run directory stalls, this thread waits; only the heartbeats continue.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hpc_grpo.errors import EndAskedError, NodesUnavailableError
from hpc_grpo.launch.agent.protocol import Order
from hpc_grpo.launch.place.base import End
from hpc_grpo.launch.supervisor import transitions
from hpc_grpo.launch.supervisor.attempt_setup import AttemptSetup
from hpc_grpo.launch.supervisor.driver_process import Driver
from hpc_grpo.launch.supervisor.nodes import Nodes
from hpc_grpo.launch.supervisor.reward_server import RewardServer
from hpc_grpo.launch.supervisor.transitions import DRIVER_GRACE_S, Action, Do, Event, RunFacts, State, react
from hpc_grpo.run.attempt import AttemptRecord
from hpc_grpo.run.checkpoint import newest_step
from hpc_grpo.run.evals import REQUEST
from hpc_grpo.run.files import space_awaited_while, when_there_is_space
from hpc_grpo.run.last_error import last_error_in_a_line
from hpc_grpo.run.stacks import STACKS_NAME, STACKS_SIGNAL
from hpc_grpo.system.process_tree import descendants, end_processes, reap_adopted
from hpc_grpo.system.processes import adopt_orphans
from hpc_grpo.system.readable import counted
from hpc_grpo.system.say import say
from hpc_grpo.system.signals import Signals

_LOOK_S = 1.0
_TEARDOWN_DEADLINE_S = 45.0
_REFORM_DEADLINE_S = 30.0  # a node whose agent has not ended by then counts as lost


class Supervisor:
    """Runs an attempt to its end. Meanwhile calls `chore` about every second with the driver's current work."""

    def __init__(self, setup: AttemptSetup, nodes: Nodes, driver_command: Sequence[str]) -> None:
        self._run, self._dir = setup.run, setup.dir
        self._signals = Signals()
        self._next_look = 0.0
        step = newest_step(setup.run)
        self._state = State(setup.max_stalled_restarts, setup.dir / STACKS_NAME, setup.place.stop_grace_s, step=step)
        self.chore: Callable[[str], None] = lambda work: None
        self.record = setup.new_record(first_step=step)
        self._processes = Processes(setup, nodes, driver_command, self.record)
        self._processes.goes_on = lambda: not (self._signals.pending or setup.run.stop_marker.exists())

    def _refuse_where_end_is_asked(self) -> None:
        if not self._processes.goes_on():
            raise EndAskedError("the disk is full", newest_step(self._run))

    def run(self) -> int:
        """Run the attempt and return the exit code to end with. Raises HpcGrpoError if Ray did not come up."""
        adopt_orphans()
        # The lock's previous owner may have saved a checkpoint while this process waited.
        self._state = replace(self._state, step=newest_step(self._run))
        with self._signals, space_awaited_while(self._refuse_where_end_is_asked):
            try:
                when_there_is_space(lambda: self._dir.mkdir(parents=True, exist_ok=True), "the attempt's folder")
                self.record.save(self._dir)
                nodes = counted(len(self.record.nodes), "node")
                is_eval = (self._run.path / REQUEST).is_file()
                what = "Engines" if is_eval else f"Attempt {self.record.attempt} of run {self._run.path.name}"
                say(f"{what} on {nodes}")
                self._processes.start()
                self._see_it_through()
            except BaseException as error:
                # Catch every type: the record must say why the attempt ended.
                end = transitions.end_by_error(error, self._state.signalled)
                self.record.end(end.kind, end.code, end.why)
                raise
            finally:
                self._processes.tear_down()
                self.record.save(self._dir)
        if not (is_eval and self.record.exit_kind == "complete"):
            say(self._why_without_what_was_printed())
        assert self.record.exit_code is not None
        return self.record.exit_code

    def _why_without_what_was_printed(self) -> str:
        printed = self._state.ended.last_error if self._state.ended else ""
        return self.record.why.replace(f": {printed}; see driver.log.", f"; see {self._dir / 'driver.log'}.")

    def _see_it_through(self) -> None:
        while not self._state.is_over:
            self._processes.wait()
            for event in self._what_happened():
                self._handle(event)
                if self._state.is_over:
                    break

    def _what_happened(self) -> Iterator[Event]:
        """Yield the events to react to, one at a time: the reaction to one may decide the next."""
        processes = self._processes
        if self._state.phase == "bring_up" and processes.nodes.is_ready:
            yield transitions.Now.RAY_READY
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_S
            if (why := processes.driver.why_late()) and not self._state.stuck:
                yield transitions.DriverStuck(why)
            self.chore(processes.driver.work)
        for why in processes.nodes.take_late():
            yield transitions.ProcessLate(why)
        while self._signals.pending:
            yield transitions.Signalled(self._signals.pending.pop(0))
        if processes.nodes.told():
            yield transitions.Now.NODES_TOLD
        if self._state.phase == "bring_up":
            if error := processes.nodes.bring_up_error():
                yield transitions.BringUpFailed(error, self._facts(), processes.nodes.lost_may_come_back())
        elif lost := processes.nodes.lost():
            yield transitions.NodesLost(lost)
        returncode = processes.driver.program.poll()
        if returncode is not None:
            processes.driver.pump()
            yield transitions.DriverEnded(returncode, self._facts(), last_error_in_a_line(processes.driver.printed))
        yield transitions.Now.TICK

    def _handle(self, event: Event) -> None:
        self._state, actions = react(self._state, event, time.monotonic())
        if self._state.signalled and not self.record.signalled:
            self.record.signalled, self.record.signalled_at = self._state.signalled, time.time()
            if not self._state.is_over:
                say(f"{self._state.signalled}: the driver ends after this step, with a checkpoint.")
        self.record.stuck = self._state.stuck
        self.record.lost_nodes |= self._state.lost
        for action in actions:
            if outcome := self._processes.perform(action):
                self._handle(outcome)

    def _facts(self) -> RunFacts:
        run = self._run
        return RunFacts(newest_step(run), is_complete=run.is_complete(), stop_asked=run.stop_marker.exists())


class Processes:
    """The nodes and the driver of an attempt, and the actions on them. Keeps the attempt's record up to date."""

    def __init__(self, setup: AttemptSetup, nodes: Nodes, driver_command: Sequence[str], record: AttemptRecord) -> None:
        self.nodes = nodes
        self._setup, self._driver_command, self._record = setup, driver_command, record
        self._driver: Driver | None = None
        self._reward_server: RewardServer | None = None
        self._begun = 0.0
        self.goes_on: Callable[[], bool] = lambda: True  # whether to keep waiting for nodes or the reward server

    @property
    def driver(self) -> Driver:
        """The driver started last; it may have ended."""
        assert self._driver is not None
        return self._driver

    def start(self) -> None:
        launch, log = self._setup.launch, self._setup.dir / "reward_server.log"
        if (asked := launch.reward_server) is not None:
            self._reward_server = RewardServer(asked, launch.bringup_deadline_s, log, self._setup.working_dir)
            if not self._reward_server.wait_until_healthy(self.goes_on):
                raise EndAskedError("the reward server does not answer yet", newest_step(self._setup.run))
        self.nodes.start()
        # Start the driver while the nodes start: its imports and its input checks take as long as Ray's start.
        self._start_driver()
        self._begun = time.monotonic()

    def wait(self) -> None:
        """Wait up to 0.2 s for output, and read it. Continue Ray's start, and restart a dead reward server.

        Raises NodesUnavailableError if another process has the reward server's port.
        """
        ready = select.select([*self.nodes.sources(), self.driver.fileno()], [], [], 0.2)[0]
        self.nodes.advance()
        if self._reward_server is not None:
            self._reward_server.keep_alive()
        if self.driver.fileno() in ready and not self.driver.pump():
            time.sleep(0.05)  # Its output is closed but it still runs. select would return at once.

    def perform(self, action: Action) -> Event | None:
        """Perform an action. Return the event that results, if any."""
        match action:
            case Do.PUBLISH_RAY:
                self._publish_ray()
            case Do.KILL_DRIVER:
                self.driver.forward(signal.SIGKILL)
            case Do.WRITE_STACKS:
                self.nodes.order(Order.STACKS)
                self.driver.forward(STACKS_SIGNAL)
            case Do.FORM_AGAIN:
                return self._form_again()
            case Do.ASK_QUEUE:
                queue = self._setup.place.queue
                ends_at = queue.preempted_until(self._setup.allocation.job_id) if queue is not None else None
                return transitions.QueueAnswered(None if ends_at is None else max(ends_at - time.time(), 0.0))
            case Do.LET_NODES_GO:
                self.nodes.order(Order.LET_GO)
            case Do.NAME_STOPPED:
                self.nodes.order(Order.NAME_STOPPED)
            case Do.SAVE_RECORD:
                self._save()
            case transitions.Forward():
                self.driver.forward(action.signal)
            case transitions.StartDriver():
                self._record.restarts.append(action.why)
                self._save()
                step = newest_step(self._setup.run)
                say(f"{action.why}\nStarting the driver again, from the checkpoint of step {step}.")
                self._start_driver()
            case transitions.NoteLate():
                self._record.late.append(action.why)
                self._save()
                say(f"{action.why} It was ended; stacks are in {self._setup.dir / STACKS_NAME}.")
            case transitions.Say():
                say(action.text)
            case transitions.Fail():
                raise action.error
            case End():
                self._record.phases_s["driver"] = round(time.monotonic() - self._begun, 2)
                self._record.end(action.kind, action.code, action.why)
                self._save()  # Slurm's SIGKILL may come during the teardown
        return None

    def tear_down(self) -> None:
        """End everything that was started, with all descendants."""
        begun = time.monotonic()
        self._close_driver()
        for node in self.nodes.tear_down(_TEARDOWN_DEADLINE_S):
            say(f"Node {node} did not tear down in {_TEARDOWN_DEADLINE_S:.0f} s; its step was killed.")
        if self._record.exit_kind == "node_lost":
            self._judge_nodes()
        end_processes(lambda: descendants(os.getpid()), DRIVER_GRACE_S)
        reap_adopted(keep=[])
        self._record.phases_s["teardown"] = round(time.monotonic() - begun, 2)

    def _publish_ray(self) -> None:
        nodes, record = self.nodes, self._record
        record.phases_s |= nodes.phases_s
        record.ray_address, record.num_gpus = nodes.ray_address, nodes.num_gpus
        record.ray_dashboard = nodes.ray_dashboard
        self._save()
        nodes.publish_ray()
        where = f"{counted(len(nodes.names), 'node')}, {counted(nodes.num_gpus, 'GPU')}"
        say(f"Ray ready on {where} ({nodes.phases_s['ray']:.1f} s)")
        if nodes.ray_dashboard:
            where = f"http://{nodes.ray_dashboard} on {nodes.names[0]}"
            say(f"Ray's dashboard: {where}, which asks for the token in {self._setup.run.secret}")

    def _form_again(self) -> Event:
        """Continue with the nodes that still answer, if they are enough."""
        self._close_driver()
        self.nodes.tear_down(_REFORM_DEADLINE_S)
        self._judge_nodes()
        try:
            anew = self.nodes.anew(self.goes_on)
        except (NodesUnavailableError, EndAskedError) as error:
            stop_asked = self._setup.run.stop_marker.exists()
            return transitions.FormedAgain(is_enough=False, error=error, stop_asked=stop_asked)
        if anew is None:
            return transitions.FormedAgain(is_enough=False)
        self._record.ray_address = self._record.ray_dashboard = ""
        self.nodes = anew
        self._record.nodes += [node for node in anew.names if node not in self._record.nodes]
        anew.start()
        say(f"Bringing Ray up again on {', '.join(anew.names)}.")
        return transitions.FormedAgain(is_enough=True)

    def _judge_nodes(self) -> None:
        """After the teardown, record the nodes that do not answer as lost, so that the next job avoids only them."""
        answering = self.nodes.answering()
        for node in self.nodes.names:
            if node in answering:
                self._record.lost_nodes.pop(node, None)
            else:
                self._record.lost_nodes.setdefault(node, "it does not answer")

    def _start_driver(self) -> None:
        self._close_driver()
        log, inside = self._setup.dir / "driver.log", self.nodes.inside("driver", "-driver")
        environ = self.nodes.head_environment()
        self._driver = Driver(self._driver_command, environ, self._setup.working_dir, log, inside)

    def _close_driver(self) -> None:
        if self._driver is not None:
            self._driver.close(DRIVER_GRACE_S)
            self._driver = None

    def _save(self) -> None:
        self._record.save(self._setup.dir)
