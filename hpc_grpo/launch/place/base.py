"""The interface between launching and the machines: a `Place`. A new kind is a class with @place_kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Literal, Protocol, TypeVar

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.place.job_queue import JobQueue
from hpc_grpo.run.attempt import ExitKind
from hpc_grpo.run.lock import LockOwner
from hpc_grpo.run.paths import RunDir


@dataclass(frozen=True)
class Allocation:
    """The nodes of one attempt. `nodes[0]` is the head, where supervisor and driver run.

    `this_node` is None if this process runs on none of them, for example in salloc's shell on the login node. `ends_at`
    is in unix seconds; None: no known limit.
    """

    job_id: str
    nodes: tuple[str, ...]
    this_node: str | None
    ends_at: float | None = None

    @property
    def head(self) -> str:
        return self.nodes[0]

    def only(self, names: Sequence[str]) -> Allocation:
        """Return the allocation with only the nodes in `names`."""
        return replace(self, nodes=tuple(node for node in self.nodes if node in names))


@dataclass(frozen=True)
class NodeResources:
    """CPUs and GPUs of one node that belong to the attempt. The machine may have more."""

    num_cpus: int
    num_gpus: int


@dataclass(frozen=True)
class End:
    """The end of an attempt: its kind, its exit code and its reason, in words."""

    kind: ExitKind
    code: int
    why: str


class NodeConnection(Protocol):
    """A process on a node, over a connection that the node opened. Has the used part of subprocess.Popen.

    `stdin` and `stdout` are ends of the connection. `returncode` is LOST_CODE once the connection is closed.
    """

    returncode: int | None
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


LOST_CODE = 255
"""Exit code of an agent's process after its connection broke: ssh exits with it, and `NodeConnection` returns it."""
AGENT_ENDED = "its agent ended with exit code"
"""Beginning of the reason of a loss if the agent's start command ended. The exit code follows."""
LOST_AGENT = f"{AGENT_ENDED} {LOST_CODE}"


class Place(Protocol):
    """The place where a run has its nodes. `allocation` and `remaining` may wait for nodes.

    `allocation` caches its answer. `node_resources`, `owner_lives` and `close` may take up to a minute.

    `name` is the `source` in attempt.json. `queue` is the queue of the allocation's job, and takes follow-on jobs;
    None: no job. `is_attended`: a user watches and judges a crash, so the driver is not restarted. `disks`: whether
    every node sees the run directory, or only the head's disk holds it. `job_id` is this process's job, known without a
    query; "" for none. `stop_grace_s` limits the driver's checkpoint after SIGTERM (no limit where a queue kills).
    `awaits_lost_nodes`: `remaining` waits for lost nodes. `dashboard_port` is where users expect Ray's dashboard; 0:
    any free port. Methods with a body here are defaults.
    """

    name: str
    queue: JobQueue | None = None
    is_attended: bool = False
    disks: Literal["shared", "private"] = "shared"
    job_id: str = ""
    stop_grace_s: float = math.inf
    awaits_lost_nodes: bool = False
    dashboard_port: int = 0

    def for_run(self, run: RunDir, launch: LaunchConfig) -> Place:
        """Return the place with this run's settings. Raises ConfigError for settings that the place cannot satisfy."""
        refuse_hosts(launch, f"the place is {self.name}, which has its own nodes")
        return self

    def allocation(self) -> Allocation:
        """Return the nodes of this attempt. Raises LaunchError if they cannot be known; asking again may help."""

    def node_resources(self) -> NodeResources:
        """Return the CPUs and GPUs that the attempt has on the node of this process. May run nvidia-smi."""

    def start_command(self, node: str, command: Sequence[str]) -> list[str]:
        """Wrap `command` to run on a node of the allocation, over the wrapper's stdin and stdout."""

    def start_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for a start command: `environ` without variables that would change the start."""
        return dict(environ)

    def connection(self, node: str, command: Sequence[str], log: IO[bytes]) -> NodeConnection | None:
        """Run `command` on a node that holds a connection to us. Return None if a start command is needed.

        `log` receives messages about the connection, like the stderr of a start command.
        """
        return None

    def carried_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables to send to an agent: those that its start command does not carry."""
        return {}

    def interface(self, node: str) -> str | None:
        """Return the network interface by which a node is known to reach the others; None: the default route's."""
        return None

    def is_node_failure(self, said: str) -> bool:
        """Return whether the node itself is gone. `said` is the agent's message, or begins with AGENT_ENDED."""

    def remaining(self, before: Allocation, answering: Sequence[str], goes_on: Callable[[], bool]) -> Allocation:
        """Return the nodes to continue with after a loss. May wait for others to return, while `goes_on()`.

        `answering` are the nodes whose agents ended in order. Raises NodesUnavailableError, naming the missing nodes,
        if the place knows that too few are left; EndAskedError if `goes_on()` ended the wait.
        """
        return before.only(answering)

    def owner_lives(self, owner: LockOwner) -> bool | None:
        """Return whether a run's owner on another host lives; None if only the beats in its lock can show that."""
        return None

    def close(self, end: End) -> None:
        """Tell waiting nodes how the attempt ended, and disconnect them."""
        return


def refuse_hosts(launch: LaunchConfig, why: str) -> None:
    """Raise ConfigError for `launch.hosts`, which has no effect here. `why` is the end of the message's sentence."""
    if launch.hosts:
        raise ConfigError(
            f"launch.hosts = {', '.join(launch.hosts)} are for `hpc-grpo train` on one of them, in no job; it reaches "
            f"the other hosts by ssh. Here {why}. Set launch.hosts=[] to use these nodes."
        )


class PlaceKind(Protocol):
    """A class of places. A call makes the place of a process from its environment."""

    name: str

    def is_here(self, environ: Mapping[str, str]) -> bool:
        """Return whether a process with this environment is in this kind of place."""

    def __call__(self, environ: Mapping[str, str]) -> Place: ...


Kind = TypeVar("Kind", bound=PlaceKind)
KINDS: list[PlaceKind] = []


def place_kind(kind: Kind) -> Kind:
    """Register a class of places for `find_place`."""
    KINDS.append(kind)
    return kind
