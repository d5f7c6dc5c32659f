"""What a machine is, and where the files of a set of machines lie."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

# 198.18.0.0/15 is reserved for benchmarking (RFC 2544): no site routes it.
SUBNET_PREFIX = "198.18.0."
OUTSIDE_PREFIX = "198.19.0."
PREFIX_LENGTH = 24

# Debian's daemons want these, or machines mount over them; nothing may have made them yet. Empty, and gone at a reboot.
_HOST_FOLDERS = (Path("/run/sshd"), Path("/run/crun"))


@dataclass(frozen=True)
class Machine:
    """One network, hostname and PID space.

    `address` is its address among the machines, on `interface`. A machine with an `outside` address has it on an
    `eth0` that leads to the world alone, as the container of a pod has: no other machine is reached by it, its own
    hostname stands for it, and a program that asks for the route to 8.8.8.8 finds it.
    """

    name: str
    address: str
    hostname: str = ""
    interface: str = "eth0"
    outside: str = ""
    other_names: tuple[str, ...] = ()

    @property
    def own_name(self) -> str:
        """Its hostname, which is its name unless it is told to be another."""
        return self.hostname or self.name


@dataclass(frozen=True)
class Mounts:
    """What a machine has to itself, and in what order: /dev/shm of `shm_mib`, then `binds` (source, target)."""

    shm_mib: int
    binds: tuple[tuple[Path, Path], ...] = ()


@dataclass(frozen=True)
class Layout:
    """Every path of a set of machines. All lie below `state`; elsewhere only `make_host_folders` writes."""

    state: Path
    state_variable: ClassVar[str] = "HPC_GRPO_MACHINES_STATE"
    default_state: ClassVar[str] = "/run/hpc-grpo-machines"
    marker_name: ClassVar[str] = "made-by-hpc-grpo-virtual-machines"

    @classmethod
    def from_environment(cls) -> Self:
        """Return the machines whose folder the environment names, or the usual ones."""
        return cls(Path(os.environ.get(cls.state_variable, cls.default_state)).absolute())

    @property
    def marker(self) -> Path:
        """Says that this folder is ours to delete."""
        return self.state / self.marker_name

    @property
    def shape(self) -> Path:
        """Written last by `up`: its presence means that the machines came up whole."""
        return self.state / "shape.json"

    @property
    def resolv_conf(self) -> Path:
        return self.state / "etc" / "resolv.conf"

    @property
    def local(self) -> Path:
        """One path that is a different folder in each machine, so that one configuration serves all."""
        return self.state / "local"

    @property
    def logs(self) -> Path:
        return self.state / "log"

    @property
    def small_disk(self) -> Path:
        """A file system of a few MiB that all machines share, for tests of a full disk."""
        return self.state / "small-disk"

    def machine_dir(self, name: str) -> Path:
        return self.state / "machines" / name

    def machine_local(self, name: str) -> Path:
        return self.machine_dir(name) / "local"

    def hosts(self, name: str) -> Path:
        return self.machine_dir(name) / "hosts"

    def init_record(self, name: str) -> Path:
        return self.machine_dir(name) / "init.json"

    def network_namespace(self, name: str) -> Path:
        """Return a mount that keeps the machine's network alive while the machine itself is dead."""
        return self.machine_dir(name) / "net"

    @staticmethod
    def make_host_folders() -> None:
        """Make folders outside the state folder that machines need. They stay: other machines may be up with them."""
        for path in _HOST_FOLDERS:
            path.mkdir(mode=0o755, exist_ok=True)


def hosts_file(machines: Sequence[Machine], own: Machine) -> str:
    """Return /etc/hosts of the machine `own`.

    >>> print(hosts_file([Machine("a", "198.18.0.11"), Machine("b", "198.18.0.12", other_names=("b.internal",))],
    ...                  Machine("a", "198.18.0.11")), end="")
    127.0.0.1 localhost
    198.18.0.11 a
    198.18.0.12 b.internal b
    """
    lines = ["127.0.0.1 localhost"]
    for machine in machines:
        names = [*machine.other_names, machine.name]
        if machine.outside and machine.name == own.name:
            lines.append(f"{machine.outside} {machine.own_name}")
        elif machine.own_name not in names and not machine.outside:
            names.append(machine.own_name)
        lines.append(f"{machine.address} {' '.join(names)}")
    return "\n".join(lines) + "\n"


def resolv_conf() -> str:
    # Nobody listens there, so an unknown name fails at once and not after the resolver's usual ten seconds.
    return f"nameserver {SUBNET_PREFIX}1\noptions timeout:1 attempts:1\n"
