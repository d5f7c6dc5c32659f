"""A bed: machines of one kind, up. What the command line does and what tests hold in their hands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import building, daemons, host, lifecycle, machine, network, packages
from .bed_layout import SWITCH, BedLayout, Shape
from .errors import MachineError
from .layout import Machine

_DAEMONS_MEMORY = ("PostgreSQL.", "libpod_lock")


@dataclass(frozen=True)
class Residue:
    """What a machine holds that its boot and its daemons do not account for."""

    processes: dict[int, str]
    shared_memory: list[str]
    tmp: list[str]

    def __bool__(self) -> bool:
        return bool(self.processes or self.shared_memory or self.tmp)


class Bed:
    """Machines that are up. Its processes are children of this one; pids are the host's."""

    def __init__(self, layout: BedLayout, shape: Shape) -> None:
        self.layout, self.shape = layout, shape

    @classmethod
    def bring_up(cls, layout: BedLayout, shape: Shape) -> Bed:
        """Bring a bed up; one of this shape that is up already is taken as it is."""
        host.require_usable(packages.COMMANDS, "make machines-install")
        if layout.state.is_relative_to("/tmp"):
            raise MachineError(f"the state folder is {layout.state}: machines have a /tmp of their own, choose another")
        with lifecycle.alone(layout):
            existing = read_shape(layout)
            if existing not in (None, shape):
                raise MachineError(f"already up with {existing}, not {shape}: run `make machines-down` first")
            bed = cls(layout, shape)
            if existing is None:
                lifecycle.bring_up(layout, lambda: building.build(layout, shape), json.dumps(asdict(shape)))
            return bed

    @classmethod
    def attach(cls, layout: BedLayout) -> Bed:
        """Return the bed that is up."""
        host.require_root()
        shape = read_shape(layout)
        if shape is None:
            raise MachineError("no virtual machines are up: run `make machines-up KIND=pods`")
        return cls(layout, shape)

    def take_down(self) -> None:
        lifecycle.take_down(self.layout)

    @property
    def names(self) -> list[str]:
        """The machines in order, a controller last."""
        return [machine.name for machine in self.shape.machines]

    def address(self, name: str) -> str:
        return self._machine(name).address

    def _machine(self, name: str) -> Machine:
        found = {machine.name: machine for machine in self.shape.machines}
        if name not in found:
            raise MachineError(f"no machine {name}; there are {', '.join(found)}")
        return found[name]

    def environment(self, name: str, **changes: str) -> dict[str, str]:
        """Return what a process on the machine starts with: nothing of this process, the kind's own, `changes`."""
        return {**building.environment(self.layout, self.shape, name), **changes}

    def popen(
        self, name: str, argv: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a process on a machine, in a session of its own: `os.killpg(process.pid, SIGINT)` is its Ctrl+C."""
        self._machine(name)
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}
        return machine.popen(self.layout, name, argv, env=self.environment(name, **(environment or {})), **options)

    def run(
        self, name: str, argv: Sequence[str], *, deadline_s: float = 60.0, stdin: str = "", **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; does not raise where it fails."""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = self.popen(name, argv, **pipes, **options)
        try:
            out, err = process.communicate(stdin, timeout=deadline_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def kill(self, name: str, *, cut_network: bool = False) -> None:
        """End all that runs on a machine. With `cut_network` its peers see silence, and no closed connection."""
        self._machine(name)
        with lifecycle.alone(self.layout):
            if cut_network:
                network.set_cable(self.layout, SWITCH, name, plugged=False)
            machine.kill(self.layout, name)

    def start(self, name: str) -> None:
        """Bring a killed machine back, plugged in; the controller's services are not started."""
        each = self._machine(name)
        with lifecycle.alone(self.layout):
            if machine.running(self.layout, name) is not None:
                raise MachineError(f"{name} is running already")
            network.set_cable(self.layout, SWITCH, name, plugged=True)
            building.boot(self.layout, self.shape, each)

    def unplug(self, name: str) -> None:
        """Cut a machine's network; what runs on it runs on."""
        self._machine(name)
        network.set_cable(self.layout, SWITCH, name, plugged=False)

    def plug(self, name: str) -> None:
        self._machine(name)
        network.set_cable(self.layout, SWITCH, name, plugged=True)

    def processes(self, name: str) -> dict[int, str]:
        """Return what runs on a machine besides its init: host's pid -> words of the command with blanks between."""
        init = machine.running(self.layout, name)
        return {} if init is None else daemons.in_pid_space_of(init.pid)

    def storage(self, name: str) -> Path:
        """Where the host sees what the machine has at `layout.storage`."""
        return self.layout.machine_storage(name) if self.shape.private_disks else self.layout.storage

    def residue(self, name: str) -> Residue:
        """Return what is left on a machine that ought to be idle."""
        init = machine.running(self.layout, name)
        if init is None:
            raise MachineError(f"{name} is not running")
        own = daemons.pids(self.layout, name)
        memory = [path.name for path in Path(f"/proc/{init.pid}/root/dev/shm").iterdir()]
        kept = {path.relative_to("/tmp").parts[0] for path, _ in building.seen_below_tmp(self.layout.machine_tmp(name))}
        return Residue(
            processes={pid: words for pid, words in self.processes(name).items() if pid not in own},
            shared_memory=[name for name in sorted(memory) if not name.startswith(_DAEMONS_MEMORY)],
            tmp=sorted(path.name for path in self.layout.machine_tmp(name).iterdir() if path.name not in kept),
        )

    def status(self) -> str:
        lines = [f"{self.shape}; state in {self.layout.state}, storage at {self.layout.storage}"]
        for each in self.shape.machines:
            init = machine.running(self.layout, each.name)
            state = f"init pid {init.pid}" if init else "dead"
            running = daemons.names(self.layout, each.name)
            names = " ".join(each.other_names)
            lines.append(f"{each.name:12} {each.address:14} {state:18} {' '.join(running)} {names}".rstrip())
        return "\n".join(lines)


def read_shape(layout: BedLayout) -> Shape | None:
    """Return the shape of the bed that is up, or None."""
    try:
        return Shape(**json.loads(layout.shape.read_text()))
    except FileNotFoundError:
        return None
