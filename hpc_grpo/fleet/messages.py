"""The lines of JSON that a controller and a VM exchange in one visit, and what they mean.

    controller                          VM (visit.py)
    Request ──────────────────────────► looks at its GPUs and its attempts
            ◄────────────────────────── Observation
    commits what it saw, decides
    Orders  ──────────────────────────► renews leases, starts, cancels — unless they took longer than ORDERS_S
            ◄────────────────────────── Outcome

Nothing on the VM changes before the controller has committed. So no lease is renewed that the database does not know
of, and a visit that a frozen VM finishes an hour later does nothing: of this, `FleetSettings.lost_s` makes use.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, get_args
from urllib.parse import quote

from hpc_grpo.fleet.states import Ending, EndKind
from hpc_grpo.system.readable import printable

PROTOCOL = 1
ORDERS_S = 10.0
"""Orders that come later after their observation are refused: what they rest on may no longer be true."""

_LONGEST_NAME = 120


class AttemptKey(NamedTuple):
    """An attempt at a job. The number is the fence: what is not of the job's newest attempt does not count."""

    job_id: str
    attempt: int

    @property
    def folder(self) -> str:
        return f"{file_name(self.job_id)}.{self.attempt}"


@dataclass(frozen=True)
class Request:
    """`log_offsets`: how much of each attempt's log the controller has, by the attempt's folder; none unless said.

    Without `with_logs` no logs are sent: orders must come soon after the observation, whatever jobs have printed.
    """

    work_dir: str
    nvidia_smi: str
    log_offsets: dict[str, int] = field(default_factory=dict)
    with_logs: bool = True
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class GpuSeen:
    index: int
    uuid: str
    memory_mib: int
    used_mib: int
    num_processes: int


@dataclass(frozen=True)
class AttemptSeen:
    """`ended` is None while it runs. `log` holds what follows the offset asked for, up to a bound."""

    key: AttemptKey
    gpus: tuple[int, ...]
    ended: Ending | None
    log_size: int
    log: bytes = b""


@dataclass(frozen=True)
class Observation:
    """`problem` says why there is nothing to see, "" if there is."""

    gpus: tuple[GpuSeen, ...] = ()
    attempts: tuple[AttemptSeen, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Orders:
    """`renew`: go on for another lease. `cancel`: checkpoint and end. `revoke`: never start. `forget`: drop the log.

    `start` holds the specs of jobs (spec.py).
    """

    renew: tuple[AttemptKey, ...] = ()
    cancel: tuple[AttemptKey, ...] = ()
    revoke: tuple[AttemptKey, ...] = ()
    forget: tuple[AttemptKey, ...] = ()
    start: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """`revoked` will never start on this VM; `failed` could not be started, and why. `problem` refuses all orders."""

    started: tuple[AttemptKey, ...] = ()
    revoked: tuple[AttemptKey, ...] = ()
    failed: tuple[tuple[AttemptKey, str], ...] = ()
    problem: str = ""

    def of(self, orders: Orders) -> Outcome:
        """Return what is about the orders: a VM has no say about the attempts of others."""
        start = {AttemptKey(spec["job_id"], spec["attempt"]) for spec in orders.start}
        started = tuple(key for key in self.started if key in start)
        revoked = tuple(key for key in self.revoked if key in orders.revoke)
        return Outcome(started, revoked, tuple(one for one in self.failed if one[0] in start), self.problem)


def file_name(job_id: str) -> str:
    """Return a name for a job's files that holds no separator and no shell's word, and is no other job's.

    >>> file_name("job123"), file_name("../a b"), file_name("..")
    ('job123', '%2E%2E%2Fa%20b', '%2E%2E')
    """
    name = quote(job_id, safe="").replace("~", "%7E")
    if name.startswith((".", "-")):
        name = name.replace(".", "%2E").replace("-", "%2D")
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}%{_digest(job_id)}"


def encode(message: Request | Observation | Orders | Outcome) -> bytes:
    """Return a message as one line."""
    values = asdict(message)
    if isinstance(message, Observation):
        for seen in values["attempts"]:
            seen["log"] = base64.b64encode(seen["log"]).decode()
    return json.dumps(values).encode() + b"\n"


def decode_request(line: bytes) -> Request:
    return Request(**json.loads(line))


def decode_observation(line: bytes) -> Observation:
    """Read what a VM answered. Raises ValueError, KeyError or TypeError for what is no such line."""
    values = json.loads(line)
    attempts = tuple(_attempt(seen) for seen in values["attempts"])
    gpus = {gpu.index: gpu for gpu in map(_gpu, values["gpus"])}
    return Observation(tuple(gpus.values()), attempts, str(values["problem"]))


def decode_orders(line: bytes) -> Orders:
    values = json.loads(line)
    return Orders(
        **{name: _keys(values[name]) for name in ("renew", "cancel", "revoke", "forget")}, start=values["start"]
    )


def decode_outcome(line: bytes) -> Outcome:
    """Read how a VM obeyed. Raises ValueError, KeyError or TypeError for what is no such line."""
    values = json.loads(line)
    failed = tuple((_key(key), str(why)) for key, why in values["failed"])
    return Outcome(_keys(values["started"]), _keys(values["revoked"]), failed, str(values["problem"]))


def _attempt(values: dict[str, Any]) -> AttemptSeen:
    ended = None if values["ended"] is None else _ending(values["ended"])
    log = base64.b64decode(values["log"])
    gpus = tuple(int(index) for index in values["gpus"])
    return AttemptSeen(_key(values["key"]), gpus, ended, int(values["log_size"]), log)


def _gpu(values: dict[str, Any]) -> GpuSeen:
    numbers = {name: _number(values[name]) for name in ("index", "memory_mib", "used_mib", "num_processes")}
    return GpuSeen(uuid=printable(str(values["uuid"])), **numbers)


def _ending(values: dict[str, Any]) -> Ending:
    kind, code, step = (values[name] for name in ("kind", "code", "step"))
    if kind not in get_args(EndKind):
        raise ValueError(f"an attempt ends in no way {kind!r}")
    numbers = [value if value is None else _number(value) for value in (code, step)]
    return Ending(kind, numbers[0], str(values["why"]), numbers[1])


def _number(value: Any) -> int:
    """Read a number that every database takes."""
    if not -(1 << 31) <= (number := int(value)) < 1 << 31:
        raise OverflowError(f"{number} is out of range")
    return number


def _key(values: list[Any]) -> AttemptKey:
    """Read a key: the one way in for what the other side says, whose texts become names of files."""
    job_id, attempt = values
    return AttemptKey(str(job_id), int(attempt))


def _keys(values: list[list[Any]]) -> tuple[AttemptKey, ...]:
    return tuple(map(_key, values))


def _digest(text: str) -> str:
    import hashlib

    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
