"""The local place: this machine. Node agents are child processes, and only the user ends the run."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping, Sequence

import psutil

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.place.base import Allocation, NodeResources, Place
from hpc_grpo.run.contract import STOP_GRACE_VARIABLE
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.commands import run_command
from hpc_grpo.system.gpus import visible_gpus

_LIST_GPUS_S = 60.0


class LocalPlace(Place):
    """This machine, as a `Place`."""

    name = "local"
    is_attended = True

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self.stop_grace_s = float(environ.get(STOP_GRACE_VARIABLE, math.inf))

    def for_run(self, run: RunDir, launch: LaunchConfig) -> Place:
        """Return this machine, or an SshPlace if the run names hosts."""
        if not launch.hosts:
            return self
        from hpc_grpo.launch.place.ssh import SshPlace  # imports this module

        return SshPlace(self._environ, launch)

    def allocation(self) -> Allocation:
        name = socket.gethostname()
        return Allocation(f"local{os.getpid()}", (name,), name)

    def node_resources(self) -> NodeResources:
        has_list = "CUDA_VISIBLE_DEVICES" in self._environ
        num_gpus = len(visible_gpus(self._environ)) if has_list else count_nvidia_gpus()
        return NodeResources(len(os.sched_getaffinity(0)), num_gpus)

    def start_command(self, node: str, command: Sequence[str]) -> list[str]:
        return list(command)

    def is_node_failure(self, said: str) -> bool:
        return False


def count_nvidia_gpus() -> int:
    """Count the GPUs that nvidia-smi lists. Raises LaunchError if it hangs: the node is broken, not without GPUs."""
    answer = run_command(["nvidia-smi", "--list-gpus"], _LIST_GPUS_S)
    if answer.is_late:
        raise LaunchError(f"The GPUs of {socket.gethostname()} are not known: {answer.error}.")
    return answer.text.count("GPU ")


def is_own_address(host: str) -> bool:
    """Return whether a name or address is one of this machine's."""
    try:
        named = {found[4][0] for found in socket.getaddrinfo(host, None)} if host else set()
    except OSError:
        return False
    own = {address.address.partition("%")[0] for found in psutil.net_if_addrs().values() for address in found}
    return bool(named & own)
