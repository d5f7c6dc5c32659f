"""A VM as a controller sees it: something that can be visited. Over ssh, or this machine itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.fleet.messages import (
    Observation,
    Orders,
    Outcome,
    Request,
    decode_observation,
    decode_outcome,
    encode,
)
from hpc_grpo.system.commands import MARK

LONGEST_LINE = 64 << 20

Decide = Callable[[Observation], Awaitable[Orders | None]]
"""Commits what was seen, and returns the orders; None for none."""


class VisitError(HpcGrpoError):
    """A visit failed. `is_before_orders`: no order was sent, so nothing has changed on the VM."""

    def __init__(self, message: str, is_before_orders: bool) -> None:
        super().__init__(message)
        self.is_before_orders = is_before_orders


@dataclass(frozen=True)
class Vm:
    """A row of the table `vms`: how to reach it."""

    vm_id: int
    name: str
    ip_address: str
    user: str
    ssh_key_path: str
    port: int
    host_key: str
    transport: str
    python: str
    work_dir: str
    nvidia_smi: str

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> Vm:
        values = {name: row[name] for name in cls.__dataclass_fields__}
        return cls(**{**values, "name": row["name"] or row["ip_address"]})


class Machine(Protocol):
    """Implemented by SshMachine and LocalMachine, and by a simulated one in tests and benchmarks."""

    async def visit(self, request: Request, decide: Decide) -> Outcome:
        """Look at the VM, have `decide` commit what was seen, and give its orders. Raises VisitError."""

    async def close(self) -> None:
        """Let go of whatever is kept open between visits."""


class Reader(Protocol):
    async def readline(self) -> bytes: ...


class Writer(Protocol):
    def write(self, data: bytes) -> None: ...


async def converse(
    reader: Reader, writer: Writer, request: Request, decide: Decide, *, is_marked: bool = False
) -> Outcome:
    """Hold a visit over the stdin and stdout of its program. Raises VisitError.

    `is_marked`: a shell started the program by `marked`, and what the shell printed before is passed over.
    """
    ordered = False
    try:
        writer.write(encode(request))
        line = await reader.readline()
        while is_marked and line:
            is_marked = line.strip() != MARK.encode()
            line = await reader.readline()
        if not line:
            raise VisitError("the visit's program said nothing", is_before_orders=True)
        orders = await decide(decode_observation(line))
        if orders is None:
            return Outcome()
        ordered = True
        writer.write(encode(orders))
        outcome = decode_outcome(await reader.readline()).of(orders)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise VisitError(f"the visit's program answered what is no answer: {error}", not ordered) from error
    except (OSError, asyncio.IncompleteReadError) as error:
        raise VisitError(f"the visit was cut off: {error}", not ordered) from error
    if outcome.problem:
        raise VisitError(outcome.problem, is_before_orders=True)
    return outcome
