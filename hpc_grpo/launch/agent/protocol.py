"""The protocol between the supervisor and a node agent: JSON lines over the agent's stdin and stdout.

The first line that the agent reads is its `NodeSpec`. Every later line is a heartbeat, an `Order` or the head's
address; `Lease` reads them. The end of stdin, or no line for `lease_s`, means that the supervisor is gone. The agent
writes one `NodeReport` per event, and `ALIVE` every few seconds. A node with its own disk sends its logs at the end
(`hand_over`, `take_part`). The protocol uses pipes: srun forwards them, and a shared file system may show files late.
"""

from __future__ import annotations

import base64
import enum
import json
import os
import select
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import IO, Any, Literal

from pydantic import TypeAdapter

from hpc_grpo import __version__
from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.place.container import Container
from hpc_grpo.run.files import from_known
from hpc_grpo.run.stacks import STACKS_NAME
from hpc_grpo.system.processes import ProcessIdentity
from hpc_grpo.system.say import say

HEAD = b"head "
"""Start of the line with the head's address for a joining node."""

ALIVE = b"alive\n"
"""Shows the supervisor that the agent is not stopped (SIGSTOP) and, once Ray runs, that its loop runs."""

_LIMIT_S, _URGENT_S = 20.0, 2.0  # time to send the logs
_BEGIN = b'{"log"'  # how a line with a part of a log begins
_PART_BYTES = 1 << 18
_MAX_FILE_BYTES = 8 << 20  # only the end of a larger log is sent
_MAX_BYTES = 64 << 20


class Order(enum.Enum):
    """Orders of the supervisor to an agent. The value is the line that is sent."""

    STACKS = b"stacks\n"
    """Ask all processes for their Python stacks."""
    LET_GO = b"let go\n"
    """End at once if a signal has asked for the end, or when one does: SIGKILL follows soon."""
    NAME_STOPPED = b"name stopped\n"
    """Report and end processes stopped by SIGSTOP, however briefly: one may have caused the driver's crash."""


@dataclass(frozen=True)
class OwnDisk:
    """The run's data for a node with its own disk. `run_dir` is a path on the head and on this node.

    `token` is Ray's token, a secret. `source` is the run's packed copy of this package (run/source.py), "" without one.
    `needs` maps config keys to files and folders that the node must have itself.
    """

    run_dir: str
    token: str = field(repr=False)
    source: str = field(repr=False)
    source_digest: str
    needs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """The copies that a node makes on its own disk before Ray starts (launch/agent/stage.py); "" means no copy.

    `environment` is a virtual environment or its squashfs image. `weights` is the folder of a model. `compiled` is the
    archive of compiled kernels, which need not exist. `version` is `version_of` the first two on the head.
    """

    environment: str = ""
    weights: str = ""
    compiled: str = ""
    version: str = ""


@dataclass(frozen=True)
class NodeSpec:
    """The task of one node agent. It reads Ray's token from `token_path`.

    `tag` names the attempt on this node ("<job id>-<node index>-<random>"). `head_address` is "ip:port", "" on the
    head, and None until the head has an address, which then comes as a separate line. `nodes` are the names of all
    nodes of the attempt. `env` and `pass_env` are those of the `launch` section. `contract_env` are variables for
    training. All three reach Ray and the actors. `environ` are variables that the agent could not inherit, some secret:
    a spec is never written to disk. `token_digest` is the digest of the head's token, "" on the head; with it a node
    checks whether it sees the head's disk. `version` is the package's version on the head. `dashboard_port` is the port
    of Ray's dashboard on the head's loopback, if it is free; 0: any free port; None: no dashboard. `templates_of` is
    the run whose templates of actors start beside Ray; "": none. `supervisor` is the sender of the spec.
    """

    node: str
    tag: str
    head_address: str | None
    token_path: str
    log_dir: str
    working_dir: str
    interface: str | None
    loopback: bool
    local_dir: str | None
    object_store_gib: float
    env: dict[str, str] = field(default_factory=dict)
    pass_env: list[str] = field(default_factory=list)
    contract_env: dict[str, str] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    lease_s: float = 60.0
    container: Container | None = None
    token_digest: str = ""
    version: str = ""
    own_disk: OwnDisk | None = None
    dashboard_port: int | None = None
    templates_of: str = ""
    stage: Stage = Stage()
    supervisor: ProcessIdentity | None = None

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> NodeSpec:
        """Parse a spec. Raises LaunchError if the supervisor has another version of this package."""
        values = json.loads(line)
        if (version := values.get("version", "")) not in ("", __version__):
            raise LaunchError(
                f"hpc-grpo {__version__} is installed on this node in {sys.prefix}, and the run uses {version}: "
                f"install that version here too."
            )
        return TypeAdapter(cls).validate_python(values)


@dataclass(frozen=True)
class NodeReport:
    """An event of a node. "up": Ray runs here. "late": the agent kills a process; `why` is the reason.

    "failed": Ray does not run here. "gone": the teardown is over. "told": a signal asked the agent to end. `dashboard`
    is the port of Ray's dashboard, 0 without one.
    """

    event: Literal["up", "late", "failed", "gone", "told"]
    node: str
    why: str = ""
    ip: str = ""
    address: str = ""
    dashboard: int = 0
    num_gpus: int = 0

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def report_from_line(line: bytes) -> NodeReport | None:
    """Parse a report from a line of the agent's stdout. Return None for other text: srun and modules print too."""
    try:
        values: Any = json.loads(line)
    except ValueError:
        return None
    is_report = isinstance(values, dict) and {"event", "node"} <= values.keys()
    return from_known(NodeReport)(values) if is_report else None


class Lease:
    """The agent's end of the pipe. `head_address` is "" until the supervisor sends the address."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._heard = time.monotonic()
        self._buffer = b""
        self.is_over = False
        self.head_address = ""

    def wait_for_spec(self) -> NodeSpec | None:
        """Wait for the spec, skipping earlier heartbeats. Return None if stdin ends first."""
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                if line:
                    return NodeSpec.from_line(line)
            elif not self._read():
                return None

    @property
    def silent_s(self) -> float:
        """Return the seconds since the supervisor's last line."""
        return time.monotonic() - self._heard

    def check(self, lease_s: float, wait_s: float) -> bool:
        """Wait up to `wait_s` for a heartbeat. Return False once the lease is over."""
        before = time.monotonic()
        if before - self._heard > lease_s:
            # Read once more before giving up: after a suspension of the node, heartbeats wait in the pipe.
            wait_s = max(wait_s, 2.0)
        is_closed = bool(select.select([self._descriptor], [], [], wait_s)[0]) and not self._read()
        self.is_over = self.is_over or is_closed or before - self._heard > lease_s
        return not self.is_over

    def take_orders(self) -> list[Order]:
        """Return the orders since the last call. Also reads the head's address."""
        whole, newline, self._buffer = self._buffer.rpartition(b"\n")
        lines = (whole + newline).splitlines(keepends=True)
        for line in lines:
            if line.startswith(HEAD):
                self.head_address = line.removeprefix(HEAD).decode().strip()
        known = {order.value: order for order in Order}
        return [known[line] for line in lines if line in known]

    def _read(self) -> bool:
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:  # a socket whose other end was killed, or cut off
            data = b""
        if data:
            self._heard = time.monotonic()
            self._buffer += data
        return bool(data)


def hand_over(folder: Path, stdout: IO[bytes], kept: Path, *, is_urgent: bool) -> None:
    """Send the files below `folder` within 20 s, or 2 s if `is_urgent`. Copy them to `kept` if that fails."""
    deadline, descriptor = time.monotonic() + (_URGENT_S if is_urgent else _LIMIT_S), stdout.fileno()
    try:
        for line in _parts(folder):
            rest = memoryview(line)
            while rest:
                if not select.select([], [descriptor], [], max(deadline - time.monotonic(), 0.0))[1]:
                    raise TimeoutError("not taken in time")
                rest = rest[os.write(descriptor, rest[: select.PIPE_BUF]) :]  # PIPE_BUF bytes do not block here
    except OSError as error:  # no time left, or the supervisor reads no more
        shutil.copytree(folder, kept, dirs_exist_ok=True)
        say(f"Logs did not reach the head ({error}): they are in {kept} of this node", sys.stderr)


def take_part(line: bytes, attempt_dir: Path, node: str) -> bool:
    """Write a node's part of a log into the attempt's folder. Return False if the line is no part of a log.

    A part that cannot be written is only reported: a log must not fail the run.
    """
    if not line.startswith(_BEGIN):
        return False
    try:
        values: dict[str, Any] = json.loads(line)
        name = PurePath(values["log"])
        is_own = name.parts[:1] == (STACKS_NAME,) or name.parts[:2] == ("nodes", node)
        if not is_own or ".." in name.parts or name.is_absolute():
            say(f"Node {node} sent a log by the name {name}, which is left out")
            return True
        path = attempt_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not values["offset"] and path.exists():  # from an earlier Ray of this attempt
            path.replace(path.with_name(f"{path.name}.before"))
        with path.open("ab" if values["offset"] else "wb") as file:
            file.write(zlib.decompress(base64.b64decode(values["data"])))
    except (OSError, ValueError, KeyError, zlib.error) as error:
        say(f"A part of a log of node {node} is lost ({error})", sys.stderr)
    return True


def _parts(folder: Path) -> Iterator[bytes]:
    """Yield the lines of all files, stacks first: they are short, and matter most if time or bytes run out."""
    left = _MAX_BYTES
    files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    for path in sorted(files, key=lambda file: (STACKS_NAME not in file.relative_to(folder).parts[:1], file)):
        with path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            begin = file.seek(max(0, end - min(_MAX_FILE_BYTES, left)))
            left -= end - begin
            for offset in range(0, end - begin, _PART_BYTES):
                data = file.read(min(_PART_BYTES, end - begin - offset))
                packed = base64.b64encode(zlib.compress(data, 1)).decode()
                part = {"log": str(path.relative_to(folder)), "offset": offset, "data": packed}
                yield json.dumps(part).encode() + b"\n"
