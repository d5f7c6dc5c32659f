"""What a bed consists of, by its kind, and where its files lie."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from .layout import OUTSIDE_PREFIX, SUBNET_PREFIX, Layout, Machine

Kind = Literal["pods", "hosts", "vms"]
KINDS: tuple[Kind, ...] = get_args(Kind)

SWITCH = "switch"
"""A network that is nobody's machine: the cables end there, so that any machine may be killed or unplugged."""
CONTROLLER = "controller"
FIRST_HOST, CONTROLLER_HOST, MAX_NODES = 11, 2, 200


@dataclass(frozen=True)
class Shape:
    """What `up` was asked for. `private_disks`: the storage is another folder on each machine, under one path."""

    kind: Kind
    nodes: int
    private_disks: bool = False
    gpus_per_node: int = 4
    shm_mib: int = 4000
    small_disk_mib: int = 64

    @property
    def node_names(self) -> list[str]:
        """
        >>> Shape("pods", 2).node_names
        ['pod1', 'pod2']
        """
        return [f"{self.kind.removesuffix('s')}{i}" for i in range(1, self.nodes + 1)]

    @property
    def machines(self) -> list[Machine]:
        nodes = [self._node(i, name) for i, name in enumerate(self.node_names)]
        return nodes + [Machine(CONTROLLER, f"{SUBNET_PREFIX}{CONTROLLER_HOST}")] * (self.kind == "vms")

    def _node(self, index: int, name: str) -> Machine:
        address = f"{SUBNET_PREFIX}{FIRST_HOST + index}"
        if self.kind != "pods":
            return Machine(name, address)
        # As on RunPod: the container's own hostname and eth0 say nothing to other pods, podnet1 does.
        return Machine(
            name,
            address,
            hostname=hashlib.sha256(name.encode()).hexdigest()[:12],
            interface="podnet1",
            outside=f"{OUTSIDE_PREFIX}{FIRST_HOST + index}",
            other_names=(f"{name}.runpod.internal",),
        )

    def environment(self, name: str) -> dict[str, str]:
        """Return what the platform, and whoever rents pods, put into the environment of a machine."""
        if self.kind != "pods":
            return {}
        head = self.node_names[0]
        variables = {"RUNPOD_POD_ID": name, "HEAD_POD_ID": head, "EXPECTED_WORKERS": str(self.nodes - 1)}
        return {**variables, "RAY_WORKER": "0" if name == head else "1"}

    def __str__(self) -> str:
        disks = "private disks" if self.private_disks else "shared storage"
        return f"{self.nodes} {self.kind} with {disks}, and {self.gpus_per_node} GPUs each by nvidia-smi"


@dataclass(frozen=True)
class BedLayout(Layout):
    """The machines' paths, and those of what a kind of machine has besides."""

    @property
    def storage(self) -> Path:
        """Where users have their files: one folder for all machines, or with private disks one for each."""
        return self.state / "storage"

    @property
    def programs(self) -> Path:
        """First on the PATH of every machine."""
        return self.state / "bin"

    @property
    def ssh(self) -> Path:
        return self.state / "ssh"

    @property
    def ssh_key(self) -> Path:
        """The key that every machine lets in; beside it its public half."""
        return self.ssh / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.ssh / "known_hosts"

    def machine_storage(self, name: str) -> Path:
        return self.machine_dir(name) / "storage"

    def machine_tmp(self, name: str) -> Path:
        return self.machine_dir(name) / "tmp"

    def gpus(self, name: str) -> Path:
        """Return the file of what nvidia-smi shows, to be rewritten by tests; `local/gpus.json` to the machine."""
        return self.machine_local(name) / "gpus.json"

    def daemon(self, name: str, service: str) -> Path:
        """Return the record of a daemon's process."""
        return self.machine_dir(name) / "daemons" / f"{service}.json"
