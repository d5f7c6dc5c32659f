"""The JSON lines that a controller and a VM exchange in one visit, and their meaning.

    controller                          VM (visit.py)
    Request ──────────────────────────► looks at its GPUs and its attempts
            ◄────────────────────────── Observation
    commits what it saw, decides
    Orders  ──────────────────────────► renews leases, starts, cancels, unless they took longer than ORDERS_S
            ◄────────────────────────── Outcome

Nothing on the VM changes before the controller has committed. So the database knows every renewed lease, and a visit
that a frozen VM finishes an hour later changes nothing. `FleetSettings.lost_s` relies on both.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import quote

from hpc_grpo.fleet.states import Ending, Int32

Message = TypeVar("Message")
PROTOCOL = 1
ORDERS_S = 10.0
"""Orders are refused if they come later than this after their observation, which may no longer be true."""

_LONGEST_NAME = 120


class AttemptKey(NamedTuple):
    """An attempt at a job. Only the newest attempt of a job counts."""

    job_id: str
    attempt: int

    @property
    def folder(self) -> str:
        return f"{file_name(self.job_id)}.{self.attempt}"


@dataclass(frozen=True)
class Request:
    """A visit's request. `log_offsets` maps an attempt's folder to the number of log bytes that the controller has.

    Without `with_logs` no logs are sent: orders must follow the observation soon, however much jobs have printed.
    """

    work_dir: str
    nvidia_smi: str
    log_offsets: dict[str, int] = field(default_factory=dict)
    with_logs: bool = True
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class GpuSeen:
    index: Int32
    uuid: str
    memory_mib: Int32
    used_mib: Int32
    num_processes: Int32


@dataclass(frozen=True)
class AttemptSeen:
    """An attempt on the VM. `ended` is None while it runs. `log`: bytes from the requested offset, up to a limit."""

    __pydantic_config__: ClassVar[Any] = {"val_json_bytes": "base64"}

    key: AttemptKey
    gpus: tuple[int, ...]
    ended: Ending | None
    log_size: int
    log: bytes


@dataclass(frozen=True)
class Observation:
    """A VM's state. `problem` says why its GPUs could not be read, "" if they were.

    No field has a default: an incomplete answer is refused, because it would remove the VM's GPUs from the database.
    """

    gpus: tuple[GpuSeen, ...]
    attempts: tuple[AttemptSeen, ...]
    problem: str


@dataclass(frozen=True)
class Orders:
    """`renew`: another lease. `cancel`: checkpoint and end. `revoke`: never start. `forget`: delete the log.

    `start` holds the specs of jobs (spec.py).
    """

    renew: tuple[AttemptKey, ...] = ()
    cancel: tuple[AttemptKey, ...] = ()
    revoke: tuple[AttemptKey, ...] = ()
    forget: tuple[AttemptKey, ...] = ()
    start: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What the VM did. `revoked` will never start on this VM. `failed` has attempts that could not start, and why.

    `problem` is why the VM refused all orders, "" if it did not.
    """

    started: tuple[AttemptKey, ...]
    revoked: tuple[AttemptKey, ...]
    failed: tuple[tuple[AttemptKey, str], ...]
    problem: str

    def of(self, orders: Orders) -> Outcome:
        """Return the part that concerns `orders`: a VM must not report on other attempts."""
        start = {AttemptKey(spec["job_id"], spec["attempt"]) for spec in orders.start}
        started = tuple(key for key in self.started if key in start)
        revoked = tuple(key for key in self.revoked if key in orders.revoke)
        return Outcome(started, revoked, tuple(one for one in self.failed if one[0] in start), self.problem)


def file_name(job_id: str) -> str:
    """Return a unique file name for a job: without separators or shell syntax.

    >>> file_name("job123"), file_name("../a b"), file_name("..")
    ('job123', '%2E%2E%2Fa%20b', '%2E%2E')
    """
    name = quote(job_id, safe="").replace("~", "%7E")
    if name.startswith((".", "-")):
        name = name.replace(".", "%2E").replace("-", "%2D")
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.blake2b(job_id.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{name[:_LONGEST_NAME]}%{digest}"


def encode(message: Request | Observation | Orders | Outcome) -> bytes:
    """Return a message as one line."""
    return json.dumps(asdict(message), default=lambda log: base64.b64encode(log).decode()).encode() + b"\n"


def decode_orders(line: bytes) -> Orders:
    values = json.loads(line)
    keys = {name: tuple(AttemptKey(*key) for key in values[name]) for name in ("renew", "cancel", "revoke", "forget")}
    return Orders(**keys, start=tuple(values["start"]))


@functools.cache
def reader(kind: type[Message]) -> Callable[[bytes], Message]:
    """Return a parser for a VM's line that checks every type. For another line it raises ValueError or RecursionError.

    Lone surrogates, which an error's text may contain, become "?": pydantic and databases refuse them.
    """
    from pydantic import TypeAdapter  # Imported here: VMs do not need it, and a visit must start fast.

    read = TypeAdapter(kind).validate_json
    return lambda line: read(json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace"))
