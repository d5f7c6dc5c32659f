"""What the cluster consists of, and where each of its files lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tools.virtual_machines.layout import SUBNET_PREFIX, Machine
from tools.virtual_machines.layout import Layout as MachineLayout

FIRST_NODE_HOST = 11
MAX_NODES = 200

CLUSTER_NAME = "virtual"
CONTROLLER = "slurmctl"
LOGIN = "login01"


@dataclass(frozen=True)
class Shape:
    """What `up` was asked for. Memory is in MiB. `constrain_cores`: a step gets the cores it asked for alone."""

    nodes: int
    cpus_per_node: int = 8
    mem_per_node_mib: int = 12000
    gpus_per_node: int = 4
    small_disk_mib: int = 64
    constrain_cores: bool = False

    @property
    def node_names(self) -> list[str]:
        """
        >>> Shape(nodes=2).node_names
        ['nid001', 'nid002']
        """
        return [f"nid{i:03d}" for i in range(1, self.nodes + 1)]

    @property
    def machines(self) -> list[Machine]:
        """Controller first: the others hang on its bridge."""
        nodes = [Machine(name, f"{SUBNET_PREFIX}{FIRST_NODE_HOST + i}") for i, name in enumerate(self.node_names)]
        return [Machine(CONTROLLER, f"{SUBNET_PREFIX}1"), Machine(LOGIN, f"{SUBNET_PREFIX}2"), *nodes]

    def __str__(self) -> str:
        each = f"{self.cpus_per_node} CPUs, {self.mem_per_node_mib} MiB and {self.gpus_per_node} fake GPUs"
        return f"{self.nodes} node(s) of {each}, small disk {self.small_disk_mib} MiB"


@dataclass(frozen=True)
class Layout(MachineLayout):
    """The machines' paths, and those of Slurm."""

    state_variable: ClassVar[str] = "HPC_GRPO_SLURM_STATE"
    default_state: ClassVar[str] = "/run/hpc-grpo-slurm"
    marker_name: ClassVar[str] = "made-by-hpc-grpo-virtual-slurm"

    @property
    def etc_slurm(self) -> Path:
        """Mounted over /etc/slurm in every machine."""
        return self.state / "etc" / "slurm"

    @property
    def munge_key(self) -> Path:
        return self.state / "etc" / "munge.key"

    @property
    def munge_socket(self) -> Path:
        return self.local / "munge.socket"

    @property
    def gpus(self) -> Path:
        return self.state / "gpus"

    @property
    def controller_state(self) -> Path:
        return self.state / "slurmctld"

    @property
    def spool(self) -> Path:
        return self.state / "spool"

    @property
    def database(self) -> Path:
        return self.state / "mariadb"
