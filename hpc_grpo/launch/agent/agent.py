"""The node agent, `python -m hpc_grpo.launch.agent.agent`: one process per node that manages Ray on its node.

Reads a `NodeSpec` and heartbeats from stdin, and writes `NodeReport`s to stdout. The agent ends when stdin ends, the
lease expires or Ray ends. At its end it kills only its own descendants and containers. It also copies Ray's logs to the
attempt's folder and removes its own folders.

After SIGTERM or SIGHUP the agent reports the signal and continues: in a preempted job, the driver still needs time for
a checkpoint. LET_GO then ends the agent at once. The supervisor sends LET_GO if the job is cancelled.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO

from hpc_grpo.errors import HpcGrpoError, LaunchError
from hpc_grpo.launch.agent import ray_command
from hpc_grpo.launch.agent.folders import SHM, OwnedDir, SharedDir, keep_ray_logs, shm_dir_path, sweep
from hpc_grpo.launch.agent.program import RayProcess, inside_of
from hpc_grpo.launch.agent.protocol import ALIVE, Lease, NodeReport, NodeSpec, Order, hand_over
from hpc_grpo.launch.agent.stage import ATTEMPT_NAME, make_copies, take_run
from hpc_grpo.launch.agent.watch import Late, Watch, ask_for_stacks, kill, watched_on_node
from hpc_grpo.launch.place import find_place
from hpc_grpo.launch.place.container import labels_of
from hpc_grpo.run.pulse import LOOK_S, PULSES_NAME
from hpc_grpo.system.process_tree import descendants, end_processes, reap_adopted
from hpc_grpo.system.processes import adopt_orphans, hold_on, write_no_core_dumps
from hpc_grpo.system.say import not_worth_the_run, say
from hpc_grpo.system.signals import end_signals

_POLL_S = 0.25
_MAX_RAY_STARTS = 3
_STACKS_S = 2.0  # time for processes to write their stacks
_END_GRACE_S = 8.0
_LEFTOVER_GRACE_S = 2.0
_URGENT_GRACE_S = 0.5
"""After a SIGTERM, Slurm's SIGKILL follows, on some sites within 5 s. The folders must be removed by then."""


class NodeAgent:
    """Serves one attempt on this node. `run` shows the order of start, watch and teardown."""

    def __init__(self, spec: NodeSpec, lease: Lease, reports: IO[bytes]) -> None:
        self._spec = spec
        self._lease = lease
        self._reports = reports
        self._is_told = self._has_reported = self._is_let_go = self._is_deaf = False
        self._ray: RayProcess | None = None
        self._dirs: list[OwnedDir] = []
        self._copies: list[SharedDir] = []
        self._watch = Watch()
        self._next_look = 0.0
        self._is_up = threading.Event()
        self._log_dir = Path(spec.log_dir)  # final place of the logs: the head's disk
        signal.signal(signal.SIGINT, signal.SIG_IGN)

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            self._is_told = True

        for number in end_signals():
            signal.signal(number, on_signal)

    def run(self) -> int:
        """Serve until the end. Return 0 if the supervisor ended this agent, 1 after a failure."""
        signs = threading.Thread(target=self._show_life, name="signs-of-life")
        signs.start()
        failure = ""
        try:
            try:
                failure = self._serve()
            except (HpcGrpoError, OSError) as error:
                failure = str(error)
            if failure:  # Before the teardown, which may take long: the driver may end for the same reason.
                self._write(NodeReport("failed", self._spec.node, why=failure).to_line())
        finally:
            self._is_up.set()
            signs.join()
            self._tear_down()
        self._write(NodeReport("gone", self._spec.node).to_line())
        return 1 if failure else 0

    def _serve(self) -> str:
        """Start Ray and serve until the end. Return the reason of a failure; "" if the supervisor ended this agent."""
        self._spec = take_run(self._spec, self._own_dirs()[0], self._goes_on)
        os.chdir(self._spec.working_dir)
        self._spec, self._copies = make_copies(self._spec, os.environ, self._goes_on)
        while self._spec.head_address is None and self._goes_on():
            self._spec = replace(self._spec, head_address=self._lease.head_address or None)
        if self._lease.is_over or self._is_ended:
            return ""
        for tries in range(_MAX_RAY_STARTS):
            ray, ended = self._start_ray(skip_ports=tries)
            if ended is None:  # Ray is up: watch it until the lease ends.
                while self._goes_on():
                    self._look(ray)
                    if why := ray.why_ended():
                        return f"{why}; see {self._log_dir}."
                    reap_adopted(keep=[ray.process.pid])
                return ""
            if self._is_ended or self._lease.is_over:
                return ""
            # Another process may take a port between the test and the start. Retry with other ports.
            say(f"ray start ended with {ended}, try {tries + 1} of {_MAX_RAY_STARTS}", sys.stderr)
            self._end_ray()
        log = ray_command.RAY_LOG_NAME
        tail = "\n".join((self._own_dirs()[0] / log).read_text(errors="replace").splitlines()[-8:])
        return f"ray start failed {_MAX_RAY_STARTS} times; see {self._log_dir / log}. Its last lines:\n{tail}"

    def _start_ray(self, skip_ports: int) -> tuple[RayProcess, int | None]:
        """Start Ray and report it. Return it with its exit code: None once it is up, 0 if this agent must end."""
        spec = self._spec
        interface, ip = ray_command.node_address(spec)
        resources = find_place().node_resources()
        ports = ray_command.choose_ports(spec.tag, resources.num_cpus, skip_ports, spec.dashboard_port)
        own_dir, shm_dir = self._own_dirs()
        (shm_dir / PULSES_NAME).mkdir(mode=0o700, exist_ok=True)
        temp_dir = own_dir / ray_command.TEMP_DIR_NAME
        self._ray = ray = RayProcess(
            ray_command.start_command(spec, ip, ports, temp_dir, resources),
            ray_command.ray_environment(os.environ, spec, ip, interface),
            own_dir / ray_command.RAY_LOG_NAME,
            inside_of(spec, "ray", shm_dir),
        )
        while not ray.is_up():
            self._look(ray)
            if ray.poll() is not None or not self._goes_on():
                return ray, ray.poll() or 0
        self._is_up.set()
        address = spec.head_address or f"{ip}:{ports.gcs}"
        num_gpus = resources.num_gpus
        up = NodeReport("up", spec.node, ip=ip, address=address, num_gpus=num_gpus, dashboard=ports.dashboard)
        self._write(up.to_line())
        return ray, None

    def _show_life(self) -> None:
        """Send signs of life, in a thread, until Ray is up: its start may wait for a disk."""
        while not self._is_up.wait(LOOK_S):
            self._write(ALIVE)

    def _look(self, ray: RayProcess) -> None:
        """Every few seconds, send a sign of life and kill late processes."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._write(ALIVE)
            self._end_late(self._watch.late(watched_on_node(shm_dir_path(self._spec.tag), ray.pid)))

    def _end_late(self, late: Sequence[Late]) -> None:
        """Report late processes, give all processes 2 s to write their stacks, and kill the late processes."""
        if not late:
            return
        for one in late:
            self._write(NodeReport("late", self._spec.node, why=one.why).to_line())
        self._ask_for_stacks()
        time.sleep(_STACKS_S)
        kill(late)

    def _ask_for_stacks(self) -> None:
        ask_for_stacks({*descendants(os.getpid()), *(self._ray.processes() if self._ray else [])})

    def _goes_on(self) -> bool:
        """Wait up to 0.25 s for the supervisor, and carry out its orders. Return False once this agent must end."""
        goes_on = self._lease.check(self._spec.lease_s, _POLL_S)
        for order in self._lease.take_orders():
            match order:
                case Order.STACKS:
                    self._ask_for_stacks()
                case Order.LET_GO:
                    self._is_let_go = True
                case Order.NAME_STOPPED:
                    self._end_late(self._watch.stopped())
        if self._lease.silent_s > self._spec.lease_s / 2:
            self._wake_supervisor()
        if self._is_told and not self._has_reported:
            self._has_reported = True
            self._write(NodeReport("told", self._spec.node).to_line())
        return goes_on and not self._is_ended

    def _wake_supervisor(self) -> None:
        """Send SIGCONT to a stopped supervisor on this node, before its agents' leases end."""
        supervisor = self._spec.supervisor
        if supervisor is None or not (supervisor.is_on_this_host and supervisor.has_process):
            return
        if hold_on(supervisor.pid) == "stopped":
            say(f"The supervisor (process {supervisor.pid}) was stopped: somebody sent it SIGSTOP.", sys.stderr)
            os.kill(supervisor.pid, signal.SIGCONT)

    @property
    def _is_ended(self) -> bool:
        return self._is_deaf or (self._is_told and self._is_let_go)

    @property
    def _is_urgent(self) -> bool:
        return self._is_deaf or self._is_told  # SIGKILL may be near

    def _own_dirs(self) -> tuple[Path, Path]:
        """Return Ray's folder and the weight store's. The first call makes both and sweeps leftovers away."""
        paths = (ray_command.temp_dir_path(self._spec, os.environ), shm_dir_path(self._spec.tag))
        if not self._dirs:
            for path in paths:
                for leftover in sweep(path.parent):
                    say(f"removed {leftover}: its agent is dead", sys.stderr)
                self._dirs.append(OwnedDir(path))
        return paths

    def _tear_down(self) -> None:
        """End Ray, copy its logs or send them to the head, and remove the folders."""
        self._end_ray()
        # The weight store first: it holds the node's memory, and copying logs can be slow.
        for owned in reversed(self._dirs):
            with not_worth_the_run("Ray's logs were not copied", sys.stderr):
                keep_ray_logs(owned.path / ray_command.TEMP_DIR_NAME, Path(self._spec.log_dir))
                kept = self._log_dir.parents[1]
                hand_over(owned.path / ATTEMPT_NAME, self._reports, kept, is_urgent=self._is_urgent)
            with not_worth_the_run(f"{owned.path} was not removed", sys.stderr):
                owned.remove()
        for copy in self._copies:
            with not_worth_the_run(f"{copy.path} was not removed", sys.stderr):
                copy.leave()
        if self._spec.container and (self._lease.is_over or self._is_urgent):
            # A dead supervisor may leave the driver's container, and the container's folder in shared memory.
            self._spec.container.end(labels_of(self._spec.tag))
            sweep(SHM)

    def _end_ray(self) -> None:
        if self._ray is not None:
            # End `ray start` first, alone: it ends Ray's processes in order. The grace time shrinks when Slurm's
            # SIGTERM comes.
            self._ray.terminate(lambda: _URGENT_GRACE_S if self._is_urgent else _END_GRACE_S)
        end_processes(lambda: descendants(os.getpid()), _URGENT_GRACE_S if self._is_urgent else _LEFTOVER_GRACE_S)
        reap_adopted(keep=[])  # pid 1 of a container may never reap

    def _write(self, line: bytes) -> None:
        try:
            self._reports.write(line)
            self._reports.flush()
        except OSError:
            self._is_deaf = True  # The lease has ended: the supervisor reads no more reports.


def main() -> int:
    lease = Lease(0)
    adopt_orphans()
    write_no_core_dumps()
    try:
        spec = lease.wait_for_spec()
    except LaunchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if spec is None:
        return 0
    os.environ.update(spec.environ)
    return NodeAgent(spec, lease, sys.stdout.buffer).run()


if __name__ == "__main__":
    sys.exit(main())
