"""The interface between launching and where it happens: a `Place`.

A new kind of place is one module beside this one: a class of this form with @place_kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Literal, Protocol, TypeVar

from hpc_grpo.errors import ConfigError

if TYPE_CHECKING:
    from hpc_grpo.config import LaunchConfig
    from hpc_grpo.launch.place.job_queue import JobQueue
    from hpc_grpo.run.attempt import ExitKind
    from hpc_grpo.run.lock import LockOwner
    from hpc_grpo.run.paths import RunDir


@dataclass(frozen=True)
class Allocation:
    """The nodes of one attempt; `nodes[0]` is the head, where supervisor and driver run.

    `num_cpus[i]` belongs to `nodes[i]`. `this_node` is None when this process runs on none of them (a shell that
    salloc left on the login node). `ends_at` is in unix seconds; None: no limit known.
    """

    job_id: str
    nodes: tuple[str, ...]
    num_cpus: tuple[int, ...]
    this_node: str | None
    ends_at: float | None = None

    @property
    def head(self) -> str:
        return self.nodes[0]

    def only(self, names: Sequence[str]) -> Allocation:
        """Leave out the nodes that are not among `names`."""
        kept = [pair for pair in zip(self.nodes, self.num_cpus, strict=True) if pair[0] in names]
        return replace(self, nodes=tuple(node for node, _ in kept), num_cpus=tuple(cpus for _, cpus in kept))


@dataclass(frozen=True)
class NodeResources:
    """CPUs and GPUs of one node that belong to the attempt: of the allocation, not of the machine."""

    num_cpus: int
    num_gpus: int


@dataclass(frozen=True)
class End:
    """The end of an attempt: how, the exit code and why, in words."""

    kind: ExitKind
    code: int
    why: str


class NodeConnection(Protocol):
    """A process on a node, behind a connection that the node opened: as much of subprocess.Popen as its holder needs.

    `stdin` and `stdout` are ends of the connection. `returncode` is LOST_CODE once it is closed.
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
"""The exit code of a start command whose connection broke: ssh's, and that of nodes which have dialed in."""
AGENT_ENDED = "its agent ended with exit code"
"""The first words on an agent whose start command ended, before the exit code."""


class Place(Protocol):
    """The place where a run has its nodes. Only `allocation` and `remaining` may wait; the former keeps its answer.

    `name` is the `source` in attempt.json. `queue`: the queue that the allocation is a job of, and that takes follow-on
    jobs; None: it is no job. `is_attended`: a user watches and judges a crash, so the driver is not started again.
    `disks`: whether every node sees the run directory, or it is on the head's disk alone. `job_id`: the job that this
    process is in, known without a question; "" in no job. `stop_grace_s`: how long a driver may take for its checkpoint
    after SIGTERM. A queue's own SIGKILL needs no limit. `awaits_lost_nodes`: `remaining` waits for them.
    `dashboard_port`: where its users look for Ray's dashboard; 0: any free port. Bodies and values are defaults.
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
        """Return the place as this run asks for it, for an attempt. Raises ConfigError for what it cannot have."""
        refuse_hosts(launch, f"the place is {self.name}, whose nodes are known without them")
        return self

    def allocation(self) -> Allocation:
        """Return the nodes of this attempt. Raises LaunchError where they cannot be known; asking again may help."""

    def node_resources(self) -> NodeResources:
        """Return the resources of the node under this process. Asks nothing of a scheduler."""

    def start_command(self, node: str, command: Sequence[str]) -> list[str]:
        """Wrap `command` so that it runs on a node of the allocation, over the stdin and stdout of the wrapper."""

    def start_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for a start command: `environ` without what would change how it starts."""
        return dict(environ)

    def connection(self, node: str, command: Sequence[str], log: IO[bytes]) -> NodeConnection | None:
        """Have `command` run on a node that holds a connection to us; None: a start command starts it.

        `log` gets what is said of the connection, like the stderr of a start command.
        """
        return None

    def carried_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that an agent has to be sent, as its start command does not bring them."""
        return {}

    def interface(self, node: str) -> str | None:
        """Return the network interface by which a node is known to reach the others; None: its own settings tell."""
        return None

    def is_node_failure(self, said: str) -> bool:
        """Tell from what is said of a loss, by an agent or after AGENT_ENDED, whether the node itself is gone."""

    def remaining(self, before: Allocation, answering: Sequence[str], goes_on: Callable[[], bool]) -> Allocation:
        """Return the nodes to go on with after a loss; may wait for others to come back, while `goes_on()`.

        `answering`: those whose agents ended in order. Raises NodesUnavailableError that names who is missing where the
        place knows that they are too few, EndAskedError where `goes_on()` ended the wait.
        """
        return before.only(answering)

    def owner_lives(self, owner: LockOwner) -> bool | None:
        """Return whether a run's owner on another host lives; None where only its signs of life can tell."""
        return None

    def close(self, end: End) -> None:
        """Tell nodes that wait how the attempt ended, and let go of them."""
        return


def refuse_hosts(launch: LaunchConfig, why: str) -> None:
    """Raise ConfigError for `launch.hosts`, which nobody would ask here; `why` is the end of a sentence."""
    if launch.hosts:
        raise ConfigError(
            f"launch.hosts = {', '.join(launch.hosts)} are for `hpc-grpo train` on one of them, in no job: it reaches "
            f"the others by ssh. Here {why}. Set launch.hosts=[] to take those."
        )


class PlaceKind(Protocol):
    """A class of places; calling it makes the place of a process from its environment."""

    name: str

    def is_here(self, environ: Mapping[str, str]) -> bool:
        """Tell from its environment whether a process is in such a place."""

    def __call__(self, environ: Mapping[str, str]) -> Place: ...


Kind = TypeVar("Kind", bound=PlaceKind)
KINDS: list[PlaceKind] = []


def place_kind(kind: Kind) -> Kind:
    """Decorate a class of places: `find_place` asks it whether it is here."""
    KINDS.append(kind)
    return kind
