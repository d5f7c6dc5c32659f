"""The local place: this machine, and the hosts of `launch.hosts` that its process reaches by ssh.

Node agents are child processes or ssh commands, and only the user ends the run. ssh never prompts (BatchMode) and
trusts only known hosts; the user's ~/.ssh/config applies. Command lines carry no environment: an agent gets its
variables with its spec, through ssh's stdin.
"""

from __future__ import annotations

import math
import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import psutil

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError, LaunchError, NodesUnavailableError
from hpc_grpo.launch.environment import is_allowed
from hpc_grpo.launch.place.base import LOST_AGENT, Allocation, NodeResources, Place
from hpc_grpo.run.contract import STOP_GRACE_VARIABLE
from hpc_grpo.run.lock import LockOwner
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.commands import MARK, Answer, marked, run_command
from hpc_grpo.system.gpus import visible_gpus

_LIST_GPUS_S = 60.0
_OPTIONS = (
    "-T",
    "-oBatchMode=yes",
    "-oStrictHostKeyChecking=yes",
    "-oConnectTimeout=15",
    "-oServerAliveInterval=10",  # ssh to an unreachable host ends after half a minute
    "-oServerAliveCountMax=3",
    "-oClearAllForwardings=yes",
    "-oForwardAgent=no",
)
_PROBE_S = 30.0
_OF_THE_MACHINE = (
    "HOME", "USER", "LOGNAME", "SHELL", "TERM", "COLUMNS", "TMPDIR", "CUDA_VISIBLE_DEVICES", "XDG_RUNTIME_DIR",
    "LOCALDIR",
)  # fmt: skip
"""Variables that describe a machine. Another machine uses its own values."""


class LocalPlace(Place):
    """This machine, as a `Place`."""

    name = "local"
    is_attended = True

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self.stop_grace_s = float(environ.get(STOP_GRACE_VARIABLE, math.inf))

    def for_run(self, run: RunDir, launch: LaunchConfig) -> Place:
        """Return this machine, or an SshPlace if the run names hosts."""
        return SshPlace(self._environ, launch) if launch.hosts else self

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
    return sum(line.startswith("GPU ") for line in answer.text.splitlines())  # of MIG, lines are indented


def is_own_address(host: str) -> bool:
    """Return whether a name or address is one of this machine's."""
    try:
        named = {found[4][0] for found in socket.getaddrinfo(host, None)} if host else set()
    except OSError:
        return False
    own = {address.address.partition("%")[0] for found in psutil.net_if_addrs().values() for address in found}
    # Debian gives the machine's own name an address such as 127.0.1.1.
    return bool(named & own) or any(str(address).startswith("127.") for address in named)


@dataclass(frozen=True)
class Host:
    """A host of `launch.hosts`; `name` is the name of its node."""

    name: str
    address: str
    user: str = ""
    port: str = ""

    def command(self, words: str) -> list[str]:
        """Return the ssh command that runs `words` in the host's shell. Its output begins after a line with MARK."""
        port = ["-p", self.port] if self.port else []
        whom = f"{self.user}@{self.address}" if self.user else self.address
        return ["ssh", *_OPTIONS, *port, "--", whom, marked(words)]

    def ask(self, words: str) -> Answer:
        """Run `words` in the host's shell. The answer leaves out the output of startup files."""
        answer = run_command(self.command(words), _PROBE_S, stdin="")
        return replace(answer, text=answer.text.partition(f"{MARK}\n")[2])


def parse_hosts(entries: Sequence[str]) -> list[Host]:
    """Parse `[user@]host[:port]` entries. Hosts with the same address are named by their ports.

    >>> [host.name for host in parse_hosts(["ann@n1", "n2:2222", "n2:2223"])]
    ['n1', 'n2', 'n2_2223']
    """
    hosts: list[Host] = []
    for entry in entries:
        user, _, rest = entry.rpartition("@")
        address, _, port = rest.partition(":")
        name = f"{address}_{port}" if address in (host.name for host in hosts) else address
        hosts.append(Host(name, address, user, port))
    return hosts


class SshPlace(LocalPlace):
    """The hosts of `launch.hosts`. This machine is one of them, and the head."""

    name = "ssh"
    is_attended = False

    def __init__(self, environ: Mapping[str, str], launch: LaunchConfig) -> None:
        super().__init__(environ)
        self._pass_env, self._least = launch.pass_env, launch.min_nodes
        self._hosts = {host.name: host for host in parse_hosts(launch.hosts)}
        self._allocation: Allocation | None = None

    def allocation(self) -> Allocation:
        """Return the hosts. Raises NodesUnavailableError, and ConfigError if no host is this machine."""
        if self._allocation is None:
            head = self._own_host()
            others = [host for host in self._hosts.values() if host != head]
            with ThreadPoolExecutor(max_workers=min(32, len(others) + 1)) as pool:
                list(pool.map(_refuse_unreachable, others))
            names = (head.name, *(host.name for host in others))
            self._allocation = Allocation(f"ssh{os.getpid()}", names, head.name)
        return self._allocation

    def start_command(self, node: str, command: Sequence[str]) -> list[str]:
        is_here = node == self.allocation().this_node
        return list(command) if is_here else self._hosts[node].command(shlex.join(command))

    def carried_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in environ.items() if is_allowed(name, self._pass_env)}
        return {name: value for name, value in kept.items() if name not in _OF_THE_MACHINE}

    def is_node_failure(self, said: str) -> bool:
        return said.startswith(LOST_AGENT)

    def remaining(self, before: Allocation, answering: Sequence[str], goes_on: Callable[[], bool]) -> Allocation:
        left, lost = before.only(answering), [node for node in before.nodes if node not in answering]
        if len(left.nodes) < (self._least or len(before.nodes)):
            raise NodesUnavailableError(
                f"{', '.join(lost)} cannot be reached any more; launch.min_nodes=N allows fewer nodes than "
                f"{len(before.nodes)}.",
                lost,
            )
        return left

    def owner_lives(self, owner: LockOwner) -> bool | None:
        """Ask the host of a run's owner whether the owner's process lives. None: no answer, or a container hides it."""
        host = self._hosts.get(owner.host)
        if host is None or not owner.boot_id:
            return None
        asked = f"cat /proc/sys/kernel/random/boot_id; stat -Lc %i /proc/self/ns/pid; cat /proc/{owner.pid:d}/stat"
        boot, *rest = host.ask(f"{{ {asked}; }} 2>/dev/null; true").text.splitlines() or [""]
        if boot != owner.boot_id:
            return False if boot else None
        if rest[:1] != [str(owner.pid_namespace)]:
            return None
        fields = rest[1].rpartition(")")[2].split() if len(rest) > 1 else []
        return bool(fields) and fields[0] != "Z" and fields[19] == str(owner.pid_started)

    def _own_host(self) -> Host:
        names = (socket.gethostname(), socket.gethostname().partition(".")[0])
        for host in self._hosts.values():
            if host.address in names or is_own_address(host.address):
                return host
        first = next(iter(self._hosts.values()))
        raise ConfigError(
            f"launch.hosts = {', '.join(self._hosts)} does not name this machine, {names[0]}, and the driver runs on "
            f"one of them. Start the run there: ssh -t {first.address} 'cd FOLDER && hpc-grpo train CONFIG'."
        )


def _refuse_unreachable(host: Host) -> None:
    """Raise NodesUnavailableError, with ssh's message, if a host runs no command."""
    answer = host.ask("echo here")
    if answer.error or answer.text.strip() != "here":
        why = (answer.error or answer.text.strip()).rstrip(".")
        raise NodesUnavailableError(
            f"launch.hosts: {host.name} cannot be reached by ssh: {why}. ssh must log in without a prompt, and know "
            f"the host's key: try {shlex.join(host.command('true'))}",
            [host.name],
        )
