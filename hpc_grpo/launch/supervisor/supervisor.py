"""The supervisor: owns one attempt from the first process to the last.

Consumes a frozen run directory and a `Place`; has Ray brought up on the nodes, runs the driver, again where it
crashed and that may help, tears down what it started, and records the attempt. Waits in one place, `_turn`, on
everything at once: nodes, the driver's output, signals. Runs in the main thread only, because the kernel ties a
child's parent-death signal to the thread that started it. Where the run directory stalls it waits for that too; only
the heartbeats of the nodes go on.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpc_grpo.config import Config
from hpc_grpo.errors import (
    EXIT_COMPLETE,
    EXIT_CRASH,
    EXIT_RESUMABLE,
    ConfigError,
    HpcGrpoError,
    LaunchError,
    NodesUnavailableError,
)
from hpc_grpo.launch.place.base import Place
from hpc_grpo.launch.supervisor.driver_process import Driver
from hpc_grpo.launch.supervisor.formation import Formation
from hpc_grpo.launch.supervisor.last_error import last_error_in_a_line
from hpc_grpo.launch.supervisor.nodes import Nodes
from hpc_grpo.launch.supervisor.restarts import Restarts
from hpc_grpo.run.attempt import AttemptRecord, ExitKind, classify
from hpc_grpo.run.checkpoint import newest_step
from hpc_grpo.run.contract import STUCK_NAME
from hpc_grpo.run.files import write_atomic
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.stacks import STACKS_NAME, STACKS_SIGNAL
from hpc_grpo.system.processes import adopt_orphans, descendants, end_processes, reap_adopted
from hpc_grpo.system.say import say
from hpc_grpo.system.signals import Signals

_TEARDOWN_DEADLINE_S = 45.0
_DRIVER_GRACE_S = 10.0
_SETTLE_S = 3.0
"""What ends a driver may be the end of a node, whose agent needs a moment to tell."""
_LOOK_S = 1.0
_STACKS_S = 5.0
"""What processes get to write their stacks."""
_STOP_GRACE_S = 60.0
"""After SIGTERM, behind which Slurm's SIGKILL waits, the driver may take so long to checkpoint. After Ctrl+C it may
take as long as it needs; a second signal ends it at once."""


class Supervisor:
    def __init__(
        self, run: RunDir, config: Config, place: Place, driver_command: Sequence[str], working_dir: Path
    ) -> None:
        self._run, self._driver_command, self._working_dir = run, driver_command, working_dir
        self._place = place
        self._max_stalled_restarts = 0 if place.is_attended else config.launch.max_stalled_restarts
        number = run.next_attempt_number()
        allocation = place.allocation()
        self._dir = run.attempt(number, allocation.job_id)
        self._formation = Formation(run, config.launch, place, number, working_dir)
        self._driver: Driver | None = None
        self._next_look = 0.0
        self._stop_at: float | None = None
        self.chore: Callable[[], None] = lambda: None
        """Called about every second, from the driver's start to its end."""
        self.record = AttemptRecord(
            attempt=number,
            job_id=allocation.job_id,
            source=place.name,
            nodes=list(allocation.nodes),
            started_at=time.time(),
            ends_at=allocation.ends_at,
            supervisor_pid=os.getpid(),
            first_step=newest_step(run),
        )

    @property
    def _nodes(self) -> Nodes:
        return self._formation.nodes

    @property
    def _lost(self) -> dict[str, str]:
        """Of the present nodes those that are gone -> why."""
        return {node: why for node, why in self.record.lost_nodes.items() if node in self._formation.allocation.nodes}

    def run(self) -> int:
        """Run one attempt; returns the exit code to end with. Raises HpcGrpoError if Ray did not come up."""
        adopt_orphans()
        self._dir.mkdir(parents=True)
        self.record.save(self._dir)
        say(f"Attempt {self.record.attempt} of run {self._run.path.name} on {_count(len(self.record.nodes), 'node')}")
        with Signals() as self._signals:
            try:
                self._nodes.start()
                # Beside the nodes: its imports, and its checks of the user's inputs, take as long as Ray's start.
                self._driver = self._start_driver()
                code = self._see_driver_through()
            except HpcGrpoError as error:
                if isinstance(error, NodesUnavailableError):
                    self.record.lost_nodes |= dict.fromkeys(error.nodes, str(error))
                failed: ExitKind = "config" if isinstance(error, ConfigError) else "bringup_failed"
                kind: ExitKind = "cancelled" if self.record.signalled else failed
                self.record.end(kind, error.exit_code, str(error))
                raise
            except BaseException as error:
                # Recorded, since nobody may have watched, and raised again.
                self.record.end("crash", EXIT_CRASH, f"The supervisor failed: {error!r}")
                raise
            finally:
                self._tear_down()
                self.record.save(self._dir)
        say(self.record.why)
        return code

    def _see_driver_through(self) -> int:
        """Start the driver again where it crashed and that may help; returns the exit code of the attempt."""
        begun = time.monotonic()
        curable: tuple[ExitKind, ...] = ("crash", "node_lost")
        restarts = {kind: Restarts(self._max_stalled_restarts) for kind in curable}
        while True:
            step = newest_step(self._run)
            kind, code, why = self._finish_driver_or_forming()
            may_help = kind in restarts and not self.record.signalled and not self._run.stop_marker.exists()
            if not (may_help and restarts[kind].allowed(newest_step(self._run) - step)):
                break
            if kind == "node_lost" and not self._form_again():
                break
            self.record.restarts.append(why)
            self.record.save(self._dir)
            say(f"{why}\nStarting the driver again, from the checkpoint of step {newest_step(self._run)}.")
            self._driver = self._start_driver()
        if kind == "resumable" and self._run.stop_marker.exists():
            kind, why = "stopped", "Stopped and checkpointed, as the STOP file asks; hpc-grpo resume takes it up again."
        self.record.phases_s["driver"] = round(time.monotonic() - begun, 2)
        self.record.end(kind, code, why)
        self.record.save(self._dir)  # before the teardown, over which Slurm's SIGKILL may come
        return code

    def _finish_driver_or_forming(self) -> tuple[ExitKind, int, str]:
        """As `_finish_driver`; nodes that do not come up once more are lost ones, and others may be left."""
        try:
            return self._finish_driver()
        except NodesUnavailableError as error:
            if not self._formation.was_formed_again:
                raise
            self.record.lost_nodes |= dict.fromkeys(error.nodes, str(error))
            return "node_lost", EXIT_CRASH, str(error)

    def _form_again(self) -> bool:
        """Bring Ray up anew on the nodes that still answer; False when they are too few to go on with."""
        if self._driver is not None:
            self._driver.close(_DRIVER_GRACE_S)
            self._driver = None
        before = self._nodes
        is_formed = self._formation.form_again()
        self._judge(before)
        if not is_formed:
            return False
        self.record.ray_address = ""
        say(f"Bringing Ray up again on {', '.join(self._formation.allocation.nodes)}.")
        return True

    def _judge(self, nodes: Nodes) -> None:
        """After their teardown: lost are those that do not answer, for the next job to keep off, and no others."""
        answering = nodes.answering()
        for node in nodes.names:
            if node in answering:
                self.record.lost_nodes.pop(node, None)
            else:
                self.record.lost_nodes.setdefault(node, "it does not answer")

    def _start_driver(self) -> Driver:
        if self._driver is not None:
            self._driver.close(_DRIVER_GRACE_S)
        self._stop_at = None
        self.record.stuck = ""
        (self._dir / STUCK_NAME).unlink(missing_ok=True)
        log = self._dir / "driver.log"
        return Driver(self._driver_command, self._nodes.head_environment(), self._working_dir, log)

    def _finish_driver(self) -> tuple[ExitKind, int, str]:
        """Wait for the driver's end; what it ended of, as `classify` has it."""
        assert self._driver is not None
        while self._driver.process.poll() is None:
            self._turn()
            if self.record.ray_address:
                self._note_lost_nodes()
            elif self._nodes.is_ready:
                self._tell_driver()
            elif self.record.signalled:
                raise LaunchError(f"{self.record.signalled} while the nodes were coming up.")
            else:
                self._nodes.check_bring_up()
            if self._stop_at is not None and time.monotonic() > self._stop_at:
                say("The driver did not end in time; killing it.")
                self._driver.forward(signal.SIGKILL)
        self._driver.pump()
        returncode = self._driver.process.returncode
        is_plain = self.record.signalled or returncode in (EXIT_COMPLETE, EXIT_RESUMABLE)
        settled_at = time.monotonic() + (0.0 if is_plain else _SETTLE_S)
        while self.record.ray_address and not self._lost and time.monotonic() < settled_at:
            self._turn()
            self._note_lost_nodes()
        said = last_error_in_a_line(self._driver.printed)
        kind, code, why = classify(returncode, self._run.is_complete(), self.record.signalled, self._lost, said)
        if kind == "crash" and self.record.stuck:
            why = f"{self.record.stuck} The stacks of its processes are in {self._dir / STACKS_NAME}."
        return kind, code, why

    def _tell_driver(self) -> None:
        """All nodes are in Ray: the driver may go on."""
        self.record.phases_s |= self._nodes.phases_s
        self.record.ray_address, self.record.num_gpus = self._nodes.ray_address, self._nodes.num_gpus
        self.record.save(self._dir)
        write_atomic(self._formation.ray_address_file, self._nodes.ray_address)
        nodes, gpus = _count(len(self._formation.allocation.nodes), "node"), _count(self._nodes.num_gpus, "GPU")
        say(f"Ray ready on {nodes}, {gpus} ({self._nodes.phases_s['ray']:.1f} s)")

    def _note_lost_nodes(self) -> None:
        """Record nodes whose Ray is gone. Learners are there on all, so the driver cannot go on and is ended."""
        for node, why in self._nodes.lost().items():
            # Of a job that is cancelled all nodes end; of one that Slurm ends for a lost node, this one came first.
            if node in self.record.lost_nodes or (self.record.signalled and not self._place.is_node_failure(why)):
                continue
            self.record.lost_nodes[node] = why
            self.record.save(self._dir)
            say(f"Lost node {node}: {why}")
            self._stop_at = self._stop_at or time.monotonic() + _DRIVER_GRACE_S

    def _turn(self) -> None:
        """Wait a moment for anything to happen, and take it in."""
        driver = self._driver
        sources = self._nodes.sources() + ([driver.fileno()] if driver is not None else [])
        ready = select.select(sources, [], [], 0.2)[0]
        self._nodes.advance()
        if driver is not None and driver.fileno() in ready and not driver.pump():
            time.sleep(0.05)  # its output is closed but it still runs: select would return at once
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_S
            self._look_after_driver()
            self.chore()
        self._handle_signals()

    def _look_after_driver(self) -> None:
        """Once the driver says that it is stuck: have the stacks written, and give that a moment before its end."""
        stuck = self._dir / STUCK_NAME
        if self.record.stuck or not stuck.exists():
            return
        self.record.stuck = stuck.read_text()
        self._nodes.ask_for_stacks()
        if self._driver is not None:
            self._driver.forward(STACKS_SIGNAL)
        self._stop_at = time.monotonic() + _STACKS_S

    def _handle_signals(self) -> None:
        if self._signals.resized and self._driver is not None:
            self._signals.resized = False
            self._driver.copy_window_size()
        while self._signals.pending:
            sig = self._signals.pending.pop(0)
            asks_for_the_end = sig != signal.SIGUSR1
            if asks_for_the_end:
                self._note_end_asked(sig)
            if self._driver is not None:
                self._driver.forward(sig)
            if asks_for_the_end:
                self.record.save(self._dir)  # at once, since SIGKILL may follow before anything else is said

    def _note_end_asked(self, sig: int) -> None:
        if self.record.signalled:
            self._stop_at = time.monotonic()
            return
        self.record.signalled, self.record.signalled_at = signal.Signals(sig).name, time.time()
        if sig == signal.SIGTERM:
            self._stop_at = time.monotonic() + _STOP_GRACE_S

    def _tear_down(self) -> None:
        begun = time.monotonic()
        if self._driver is not None:
            self._driver.close(_DRIVER_GRACE_S)
        for node in self._nodes.tear_down(_TEARDOWN_DEADLINE_S):
            say(f"Node {node} did not tear down in {_TEARDOWN_DEADLINE_S:.0f} s; its step was killed.")
        if self.record.exit_kind == "node_lost":
            self._judge(self._nodes)
        end_processes(lambda: descendants(os.getpid()), _DRIVER_GRACE_S)
        reap_adopted(keep=[])
        self.record.phases_s["teardown"] = round(time.monotonic() - begun, 2)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
