"""The head of nodes that join by themselves, as a `Place`. It accepts workers at its gate and runs agents on them.

The commands `hpc-grpo place pod` and `hpc-grpo place host head` set HEAD_VARIABLE for this. Each process of the run
records its host in the run directory, so that `stop` finds it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import IO

from hpc_grpo import __version__
from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import EndAskedError, NodesUnavailableError
from hpc_grpo.launch.place.base import LOST_AGENT, Allocation, End, NodeConnection, NodeResources, Place, place_kind
from hpc_grpo.launch.place.joined.connection import LEFT, TOKEN_VARIABLE, JoinedProcess, farewell, make_token
from hpc_grpo.launch.place.joined.gate import Gate
from hpc_grpo.launch.place.joined.roles import interface_of, node_name
from hpc_grpo.launch.place.local import LocalPlace
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.checkpoint import newest_step
from hpc_grpo.run.files import from_known, read_record, write_record
from hpc_grpo.run.lock import LockOwner, read_lock_owner
from hpc_grpo.run.owner import refuse_shared
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.readable import counted
from hpc_grpo.system.say import say
from hpc_grpo.system.signals import Signals

HEAD_VARIABLE = "HPC_GRPO_JOINED_HEAD"

_SAY_AGAIN_S = 15.0
_LOOK_S = 0.2
_REDIAL_S = 20.0  # a worker whose agent has ended dials again within this time
_FIRST_WAIT_S = 1800.0  # long, because people may start workers by hand
_FIRST_WAIT = 15  # the first wait in units of `launch.rejoin_s`, if that is longer
_FAREWELL_S = 20.0
_ENDS_S = 120.0  # time for an orderly teardown, before the rest is killed


@place_kind
class JoinedPlace(Place):
    """The head, with the workers that have dialed it. Usable once `for_run` has named the run."""

    name = "joined"
    awaits_lost_nodes = True
    dashboard_port = 8265
    _run: RunDir
    _launch: LaunchConfig

    @staticmethod
    def is_here(environ: Mapping[str, str]) -> bool:
        return HEAD_VARIABLE in environ

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._head = node_name(environ)
        self._gate: Gate | None = None
        self._allocation: Allocation | None = None
        self._interfaces: dict[str, str | None] = {}
        self._at_the_end = ExitStack()

    def for_run(self, run: RunDir, launch: LaunchConfig) -> Place:
        self._run, self._launch = run, launch
        return super().for_run(run, launch)

    def allocation(self) -> Allocation:
        """Return the head and the requested number of workers, once they have joined.

        After half an hour, or 15 times `launch.rejoin_s` if that is longer, `launch.min_nodes` are enough. Raises
        NodesUnavailableError with the missing nodes of the previous attempt. Raises EndAskedError for a signal or the
        STOP file.
        """
        if self._allocation is None:
            self.node_resources()  # raises before the wait if nvidia-smi hangs
            wait_s = max(_FIRST_WAIT_S, _FIRST_WAIT * self._launch.rejoin_s)
            with Signals() as signals:
                goes_on = lambda: not (signals.pending or self._run.stop_marker.exists())  # noqa: E731
                nodes = self._wait_for_workers(self._known_names(), wait_s, goes_on)
            self._allocation = Allocation(f"joined{os.getpid()}", nodes, self._head)
        return self._allocation

    def node_resources(self) -> NodeResources:
        return LocalPlace(self._environ).node_resources()

    def start_command(self, node: str, command: Sequence[str]) -> list[str]:
        assert node == self._head, f"{node} is reached by its connection"
        return list(command)

    def start_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in environ.items() if name not in (HEAD_VARIABLE, TOKEN_VARIABLE)}

    def connection(self, node: str, command: Sequence[str], log: IO[bytes]) -> NodeConnection | None:
        if node == self._head:
            return None
        gate = self._opened()
        if (found := gate.take(node)) is None:  # The worker has left: its connection is closed.
            found, theirs = socket.socketpair()
            theirs.close()
        words = list(command[command.index("-m") :])  # a worker uses its own Python and package
        with suppress(OSError):  # The worker has left. Treat it like an agent that began and ended.
            found.send(json.dumps({"run": words, "node": node}).encode() + b"\n")
        return JoinedProcess(found, node, log, on_end=lambda: gate.forget(node))

    def interface(self, node: str) -> str | None:
        """Return the interface of the node's connection. On pods the default route may use another interface."""
        return self._interfaces.get(node)

    def is_node_failure(self, said: str) -> bool:
        return said.startswith(LOST_AGENT) or said.endswith(LEFT)

    def remaining(self, before: Allocation, answering: Sequence[str], goes_on: Callable[[], bool]) -> Allocation:
        wait_s = max(self._launch.rejoin_s, _REDIAL_S)
        self._allocation = replace(before, nodes=self._wait_for_workers(before.nodes[1:], wait_s, goes_on))
        return self._allocation

    def close(self, end: End) -> None:
        """Close the gate. Tell the workers first, if no head restarts after this end."""
        if end.kind in ("complete", "stopped", "config", "crash"):  # after any other end, the head may restart
            names = self._allocation.nodes[1:] if self._allocation is not None else self._known_names()
            line = farewell(end.kind, end.code, end.why)
            with suppress(NodesUnavailableError):  # Another head has the port, and informs its workers.
                self._opened(with_new_token=False).say_farewell(line, names, _FAREWELL_S)
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        self._at_the_end.close()

    def _opened(self, *, with_new_token: bool = True) -> Gate:
        if self._gate is None:
            token = partial(make_token, self._run.join_token, self._environ, anew=with_new_token)
            self._gate = Gate(self._launch.port, token, __version__, self._head)
            self._at_the_end.enter_context(member(self._run, f"head-{self._head}"))
        return self._gate

    def _known_names(self) -> Sequence[str]:
        """Return the workers of the previous attempt."""
        records = [record for record in read_attempts(self._run) if record.source == self.name]
        return records[-1].nodes[1:] if records else ()

    def _wait_for_workers(self, known: Sequence[str], wait_s: float, goes_on: Callable[[], bool]) -> tuple[str, ...]:
        """Wait until all workers have joined, or time is up. Return the head and the joined nodes.

        Raises NodesUnavailableError if too few nodes joined, EndAskedError if `goes_on()` is False.
        """
        gate, expected = self._opened(), self._launch.num_nodes - 1
        begun, said_at, seen = time.monotonic(), -_SAY_AGAIN_S, None
        while True:
            here = gate.waiting()
            waited_s = time.monotonic() - begun
            if len(here) >= expected or waited_s > wait_s:
                break
            if not goes_on():
                raise EndAskedError(_found(self._head, [*here], expected, known), newest_step(self._run))
            if [*here] != seen or waited_s - said_at >= _SAY_AGAIN_S:
                seen, said_at = [*here], waited_s
                say(f"{_found(self._head, seen, expected, known)} ({waited_s:.0f} of {wait_s:.0f} s; port {gate.port})")
            time.sleep(_LOOK_S)
        names = [*here][:expected]
        if 1 + len(names) < (self._launch.min_nodes or self._launch.num_nodes):
            raise NodesUnavailableError(
                f"{_found(self._head, names, expected, known)}: waited {waited_s:.0f} s. Start the same command there "
                f"with the same config and token; launch.rejoin_s=S waits longer, launch.min_nodes=N allows "
                f"fewer nodes.",
                _missing(names, known),
            )
        self._interfaces |= {name: here[name].interface for name in names}
        if (address := gate.own_address()) is not None:
            self._interfaces[self._head] = interface_of(address)
        say(f"{counted(1 + len(names), 'node')} here: {', '.join([self._head, *names])}.")
        return (self._head, *names)


def _missing(here: Sequence[str], known: Sequence[str]) -> list[str]:
    return [name for name in known if name not in here]


def _found(head: str, here: Sequence[str], expected: int, known: Sequence[str]) -> str:
    """Return a sentence about which nodes have joined and which are missing.

    >>> _found("pod1", ["pod2"], 2, ["pod2", "pod3"])
    '2 of 3 nodes are here (pod1, pod2), missing: pod3'
    """
    number = expected - len(here)
    named = ", ".join(_missing(here, known)[:number]) or counted(number, "worker")
    return f"{1 + len(here)} of {1 + expected} nodes are here ({', '.join([head, *here])}), missing: {named}"


@contextmanager
def member(run: RunDir, name: str) -> Iterator[None]:
    """During the block, record this process in the run directory as `name`, for example "worker-pod2"."""
    run.create()
    record = run.members / f"{name}-{os.getpid()}.json"
    write_record(record, asdict(LockOwner.here(name, 0)))
    try:
        yield
    finally:
        record.unlink(missing_ok=True)


def stop_here(run: RunDir) -> Iterator[str]:
    """End the processes of the run on this host; yield a line for each.

    A training head ends after its step and a checkpoint, and tells its workers. A waiting head and a worker end at
    once. Raises ConfigError if another user may write the run directory: its files name the processes.
    """
    refuse_shared(run.path)
    owner = read_lock_owner(run)
    is_led_here = owner is not None and owner.is_on_this_host and owner.has_process
    if is_led_here:
        run.stop_marker.touch()
        yield "The run ends after its step and a checkpoint."
    read = [(path, read_record(path, from_known(LockOwner))) for path in sorted(run.members.glob("*.json"))]
    found = [(path, process) for path, process in read if process and process.is_on_this_host and process.has_process]
    if not found:
        yield "Nothing of the run is left on this host." if is_led_here else "Nothing of the run is on this host."
    for path, process in found:
        is_owner = is_led_here and owner is not None and owner.pid == process.pid
        if not is_owner and path.exists() and process.has_process:  # otherwise the head has asked the process to end
            os.kill(process.pid, signal.SIGTERM)
        deadline = math.inf if is_owner else time.monotonic() + _ENDS_S
        while process.has_process and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if process.has_process:
            os.kill(process.pid, signal.SIGKILL)
        path.unlink(missing_ok=True)
        yield f"{process.job_id} (process {process.pid}) has ended."
