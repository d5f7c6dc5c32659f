"""The supervisor: owns the nodes of one attempt from the first process to the last.

Consumes a frozen run directory and a `Topology`; starts one agent per node, waits until every node and GPU is in
Ray, runs the driver, tears down what it started, and records the attempt. Waits in one place, `_turn`, on
everything at once: reports, the probe, the driver's output, signals. Runs in the main thread only, because the
kernel ties a child's parent-death signal to the thread that started it.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpc_grpo.config.schema import Config
from hpc_grpo.errors import EXIT_CRASH, HpcGrpoError, LaunchError, NodesUnavailableError
from hpc_grpo.launch.attempt_record import AttemptRecord, ExitKind, classify
from hpc_grpo.launch.bringup import RayWatch
from hpc_grpo.launch.driver import Driver, contract_environment
from hpc_grpo.launch.network import node_address
from hpc_grpo.launch.node_dirs import shm_dir_path
from hpc_grpo.launch.node_link import NodeLink
from hpc_grpo.launch.processes import adopt_orphans, descendants, end_processes, reap_adopted
from hpc_grpo.launch.protocol import NodeSpec
from hpc_grpo.launch.ray_cluster import ray_environment
from hpc_grpo.launch.restarts import Restarts
from hpc_grpo.launch.signals import Signals
from hpc_grpo.launch.topology import Topology
from hpc_grpo.manifest import newest_step
from hpc_grpo.run_dir import RunDir, write_atomic

_HEARTBEAT_S = 5.0
_TEARDOWN_DEADLINE_S = 45.0
_DRIVER_GRACE_S = 10.0
_STOP_GRACE_S = 60.0
"""After SIGTERM, behind which Slurm's SIGKILL waits, the driver may take so long to checkpoint. After Ctrl+C it may
take as long as it needs; a second signal ends it at once."""


class Supervisor:
    def __init__(
        self, run: RunDir, config: Config, topology: Topology, driver_command: Sequence[str], working_dir: Path
    ) -> None:
        self._run, self._config, self._topology = run, config, topology
        self._driver_command = driver_command
        self._working_dir = working_dir
        self._number = run.next_attempt_number()
        self._dir = run.attempt(self._number, topology.job_id)
        self._contract = contract_environment(self._number, self._dir, self._ray_address, topology.ends_at)
        self._links: list[NodeLink] = []
        self._watch: RayWatch | None = None
        self._driver: Driver | None = None
        self._next_heartbeat = 0.0
        self._stop_at: float | None = None
        self._signalled = ""
        self.record = AttemptRecord(
            self._number,
            topology.job_id,
            topology.source,
            list(topology.nodes),
            time.time(),
            topology.ends_at,
            os.getpid(),
            newest_step(run),
        )

    @property
    def was_signalled(self) -> bool:
        """Whether somebody asked the attempt to end: Slurm at the time limit, or a user."""
        return bool(self._signalled)

    def run(self, successor_of: str = "") -> int:
        """Run one attempt; returns the exit code to end with. Raises HpcGrpoError if Ray did not come up.

        `successor_of` is the job that had queued this one, if any.
        """
        adopt_orphans()
        self._dir.mkdir(parents=True)
        self.record.successor_of = successor_of
        self.record.save(self._dir)
        _say(f"Attempt {self._number} of run {self._run.path.name} on {_count(len(self._topology.nodes), 'node')}")
        with Signals() as self._signals:
            try:
                self._start()
                if self._comes_up():
                    self._tell_driver()
                code = self._train()
            except HpcGrpoError as error:
                kind = "cancelled" if self._signalled else "bringup_failed"
                self.record.end(kind, error.exit_code, str(error))  # type: ignore[arg-type]
                raise
            except BaseException as error:
                # Recorded, since nobody may have watched, and raised again.
                self.record.end("crash", EXIT_CRASH, f"The supervisor failed: {error!r}")
                raise
            finally:
                self._tear_down()
                self.record.save(self._dir)
        _say(self.record.why)
        return code

    def _start(self) -> None:
        """Start an agent on every node, and beside them the driver: its imports take as long as Ray's start."""
        _make_token(self._run.secret)
        for index, node in enumerate(self._topology.nodes):
            self._links.append(NodeLink(self._topology, index, self._dir / "nodes" / node))
        self._links[0].send_spec(self._spec(0, ""))
        self._driver = self._start_driver()

    def _comes_up(self) -> bool:
        """Wait until all nodes and GPUs are in Ray; False when the driver has ended before that."""
        begun = time.monotonic()
        deadline = begun + self._config.launch.bringup_deadline_s
        if not self._wait(lambda: self._links[0].up is not None, deadline):
            return False
        head = self._links[0].up
        assert head is not None
        self.record.phases_s["head"] = self._since(begun)
        for index in range(1, len(self._links)):
            self._links[index].send_spec(self._spec(index, head.address))
        env = {**self._head_environment(), "RAY_ADDRESS": head.address}
        self._watch = watch = RayWatch(head.address, env, self._dir / "probe.log")
        if not self._wait(lambda: watch.sees([link.up for link in self._links]), deadline):
            return False
        watch.close()
        self.record.phases_s["ray"] = self._since(begun)
        self.record.ray_address = head.address
        self.record.num_gpus = sum(link.up.num_gpus for link in self._links if link.up)
        self.record.save(self._dir)
        return True

    def _tell_driver(self) -> None:
        write_atomic(self._ray_address, self.record.ray_address)
        nodes, gpus = _count(len(self._links), "node"), _count(self.record.num_gpus, "GPU")
        _say(f"Ray ready on {nodes}, {gpus} ({self.record.phases_s['ray']:.1f} s)")

    def _wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Turn until `condition` holds; False when the driver ends first. Raises LaunchError past the deadline."""
        while not condition():
            if self._driver is not None and self._driver.process.poll() is not None:
                return False
            self._check_bring_up(deadline)
            self._turn()
        return True

    def _check_bring_up(self, deadline: float) -> None:
        if self._signalled:
            raise LaunchError(f"{self._signalled} while the nodes were coming up.")
        for link in self._links:
            if why := link.why_ended():
                raise NodesUnavailableError(f"Node {link.node} did not come up: {why}")
        if time.monotonic() > deadline:
            reports = {link.node: link.up for link in self._links}
            missing = self._watch.missing(reports) if self._watch else [self._topology.head]
            raise NodesUnavailableError(
                f"After {self._config.launch.bringup_deadline_s:.0f} s not in Ray: {', '.join(missing)}. Their logs "
                f"are in {self._dir / 'nodes'}; launch.bringup_deadline_s gives more time."
            )

    def _train(self) -> int:
        """Run the driver, again where it crashed and that may help; returns the exit code of the attempt."""
        begun = time.monotonic()
        restarts = Restarts(self._config.launch.max_stalled_restarts if self._topology.source == "slurm" else 0)
        while True:
            step = newest_step(self._run)
            kind, code, why = self._finish_driver()
            may_help = kind == "crash" and not self._run.stop_marker.exists()
            if not (may_help and restarts.allowed(newest_step(self._run) - step)):
                break
            self.record.restarts.append(why)
            self.record.save(self._dir)
            _say(f"{why}\nStarting it again on the same nodes, from the checkpoint of step {newest_step(self._run)}.")
            self._driver = self._start_driver()
        if kind == "resumable" and self._run.stop_marker.exists():
            kind, why = "stopped", "Stopped and checkpointed, as the STOP file asks; hpc-grpo resume takes it up again."
        self.record.phases_s["driver"] = self._since(begun)
        self.record.end(kind, code, why)
        return code

    def _start_driver(self) -> Driver:
        if self._driver is not None:
            self._driver.close(_DRIVER_GRACE_S)
        return Driver(self._driver_command, self._head_environment(), self._working_dir, self._dir / "driver.log")

    def _finish_driver(self) -> tuple[ExitKind, int, str]:
        """Wait for the driver's end; what it ended of, as `classify` has it."""
        assert self._driver is not None
        while self._driver.process.poll() is None:
            self._turn()
            self._note_lost_nodes()
            if self._stop_at is not None and time.monotonic() > self._stop_at:
                _say("The driver did not end in time; killing it.")
                self._driver.forward(signal.SIGKILL)
        self._driver.pump()
        returncode = self._driver.process.returncode
        return classify(returncode, self._run.is_complete(), self._signalled, self.record.lost_nodes)

    def _note_lost_nodes(self) -> None:
        """Record nodes whose Ray is gone; without the head's nothing can go on, so the driver is ended."""
        for link in self._links:
            if link.node in self.record.lost_nodes or not (why := link.why_ended()):
                continue
            self.record.lost_nodes[link.node] = why
            self.record.save(self._dir)
            _say(f"Lost node {link.node}: {why}")
            if link.node == self._topology.head and self._driver is not None:
                self._driver.forward(signal.SIGTERM)
                self._stop_at = time.monotonic() + _DRIVER_GRACE_S

    def _turn(self) -> None:
        """Wait a moment for anything to happen, and take it in."""
        sources = [link for link in self._links if link.process.poll() is None]
        readers = [link.fileno() for link in sources]
        if self._watch is not None and self._watch.fileno() >= 0:
            readers.append(self._watch.fileno())
        if self._driver is not None:
            readers.append(self._driver.fileno())
        ready = select.select(readers, [], [], 0.2)[0]
        for link in self._links:
            link.read_reports()
        if self._watch is not None:
            self._watch.read()
        if self._driver is not None and self._driver.fileno() in ready and not self._driver.pump():
            time.sleep(0.05)  # its output is closed but it still runs: select would return at once
        if time.monotonic() >= self._next_heartbeat:
            self._next_heartbeat = time.monotonic() + _HEARTBEAT_S
            for link in sources:
                link.heartbeat()
        self._handle_signals()

    def _handle_signals(self) -> None:
        if self._signals.resized and self._driver is not None:
            self._signals.resized = False
            self._driver.copy_window_size()
        while self._signals.pending:
            sig = self._signals.pending.pop(0)
            if sig != signal.SIGUSR1:
                again = bool(self._signalled)
                self._signalled = signal.Signals(sig).name
                if again:
                    self._stop_at = time.monotonic()
                elif sig == signal.SIGTERM:
                    self._stop_at = time.monotonic() + _STOP_GRACE_S
            if self._driver is not None:
                self._driver.forward(sig)

    def _tear_down(self) -> None:
        begun = time.monotonic()
        if self._driver is not None:
            self._driver.close(_DRIVER_GRACE_S)
        if self._watch is not None:
            self._watch.close()
        for link in self._links:
            link.release()
        deadline = time.monotonic() + _TEARDOWN_DEADLINE_S
        for link in self._links:
            if not link.wait(deadline):
                _say(f"Node {link.node} did not tear down in {_TEARDOWN_DEADLINE_S:.0f} s; its step was killed.")
        end_processes(lambda: descendants(os.getpid()), _DRIVER_GRACE_S)
        reap_adopted(keep=[])
        self.record.phases_s["teardown"] = self._since(begun)

    def _spec(self, index: int, head_address: str) -> NodeSpec:
        launch = self._config.launch
        return NodeSpec(
            node=self._topology.nodes[index],
            tag=f"{self._topology.job_id}-{self._number}-{index}",  # some nodes share their /tmp
            head_address=head_address,
            token_path=str(self._run.secret),
            log_dir=str(self._dir / "nodes" / self._topology.nodes[index]),
            working_dir=str(self._working_dir),
            interface=launch.interface,
            loopback=len(self._topology.nodes) == 1,
            local_dir=launch.local_dir,
            object_store_gib=launch.object_store_gib,
            env=launch.env,
            pass_env=launch.pass_env,
            contract_env=self._contract,
        )

    def _head_environment(self) -> dict[str, str]:
        """What the driver sees: the same as actors of this node, which is the head."""
        spec = self._spec(0, "")
        interface, ip = node_address(spec)
        return ray_environment(os.environ, spec, ip, interface, str(shm_dir_path(spec.tag)))

    @property
    def _ray_address(self) -> Path:
        return self._dir / "ray_address"

    @staticmethod
    def _since(begun: float) -> float:
        return round(time.monotonic() - begun, 2)


def _make_token(path: Path) -> None:
    """Ray's token of this run, in a file that only the user can read."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, secrets.token_hex(32), mode=0o600)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _say(text: str) -> None:
    print(text, flush=True, file=sys.stdout)
