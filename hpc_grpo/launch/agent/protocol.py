"""What passes between the supervisor and a node agent: JSON lines over the agent's stdin and stdout.

The first line the agent reads is its `NodeSpec`; every later line is a heartbeat or STACKS_REQUEST. The end of
stdin, or no line for `lease_s`, means that the supervisor is gone. The agent writes one `NodeReport` per event.
Pipes rather than files: srun forwards them, and a shared file system may show a file a minute late.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

STACKS_REQUEST = b"stacks\n"
"""Has the agent ask its processes for their Python stacks."""


@dataclass(frozen=True)
class NodeSpec:
    """What a node agent does. No secret is in it: the token is read from `token_path`.

    `tag` names the attempt on this node ("<job id>-<attempt number>-<node index>"). `head_address` is "ip:port", empty
    on the head itself. `nodes` are the names of all nodes of the attempt. `env` and `pass_env` are those of the
    `launch` section, `contract_env` the variables that training is told; both reach Ray and the actors.
    """

    node: str
    tag: str
    head_address: str
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
    lease_s: float = 60.0

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True)
class NodeReport:
    """One event of a node. "up": Ray runs here; "failed": it does not, and why; "gone": torn down."""

    event: Literal["up", "failed", "gone"]
    node: str
    why: str = ""
    ip: str = ""
    interface: str = ""
    address: str = ""
    temp_dir: str = ""
    num_cpus: int = 0
    num_gpus: int = 0
    num_killed: int = 0

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def spec_from_line(line: bytes) -> NodeSpec:
    return NodeSpec(**json.loads(line))


def report_from_line(line: bytes) -> NodeReport | None:
    """The report in a line of the agent's stdout; None for anything else (srun and modules also print there)."""
    try:
        values: Any = json.loads(line)
    except ValueError:
        return None
    return NodeReport(**values) if isinstance(values, dict) and "event" in values else None
