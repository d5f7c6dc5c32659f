"""A VM that a controller can visit: over ssh, with a pinned host key, or this machine itself."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import asyncssh

from hpc_grpo.errors import ConfigError, HpcGrpoError
from hpc_grpo.fleet.messages import Observation, Orders, Outcome, Request, encode, reader
from hpc_grpo.fleet.settings import DATABASE_VARIABLE, NATS_VARIABLE
from hpc_grpo.system.commands import MARK, marked

_LONGEST_LINE = 64 << 20
_CONNECT_S = 10.0
_KEEPALIVE_S = 10.0
_END_S = 2.0
_STDERR_S = 1.0

Decide = Callable[[Observation], Awaitable[Orders | None]]
"""Commits an observation, and returns the orders; None for no orders."""


class VisitError(HpcGrpoError):
    """A visit failed. `is_before_orders`: no order was sent, or the VM refused all orders."""

    def __init__(self, message: str, is_before_orders: bool) -> None:
        super().__init__(message)
        self.is_before_orders = is_before_orders


@dataclass(frozen=True)
class Vm:
    """A row of the table `vms`: how to reach the VM."""

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
    """A VM that a controller visits: SshMachine, LocalMachine, or a simulated machine in tests and benchmarks."""

    async def visit(self, request: Request, decide: Decide) -> Outcome:
        """Observe the VM, let `decide` commit the observation, and deliver the orders. Raises VisitError."""

    async def close(self) -> None:
        """Close connections that stay open between visits."""


class LocalMachine:
    """This machine as a VM. A child process makes each visit. `vm.python` "" or "python3" is this Python."""

    def __init__(self, vm: Vm) -> None:
        self._python = sys.executable if vm.python in ("", "python3") else vm.python

    async def visit(self, request: Request, decide: Decide) -> Outcome:
        pipe = asyncio.subprocess.PIPE
        argv = (self._python, "-m", "hpc_grpo.fleet.visit")
        # Jobs must not get the passwords in these URLs.
        environ = {name: value for name, value in os.environ.items() if name not in (DATABASE_VARIABLE, NATS_VARIABLE)}
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=pipe, stdout=pipe, stderr=pipe, limit=_LONGEST_LINE, env=environ
            )
        except OSError as error:
            raise VisitError(f"{self._python} could not be run: {error.strerror}", is_before_orders=True) from error
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            return await converse(process.stdout, process.stdin, process.stderr, request, decide)
        finally:
            process.stdin.close()  # the program ends at the end of its stdin
            try:
                await asyncio.wait_for(process.wait(), _END_S)
            except TimeoutError:
                process.kill()
                await process.wait()

    async def close(self) -> None: ...


class SshMachine:
    """Visits over a connection that is opened on demand, and again after it broke."""

    def __init__(self, vm: Vm, known_hosts: Path) -> None:
        self._vm = vm
        self._known_hosts = known_hosts
        self._connection: asyncssh.SSHClientConnection | None = None
        self._connecting = asyncio.Lock()

    async def visit(self, request: Request, decide: Decide) -> Outcome:
        """Run a visit. The command line is fixed, except the row's `python`, which is quoted."""
        command = marked(f"{shlex.quote(self._vm.python)} -m hpc_grpo.fleet.visit")
        try:
            connection = await self._connected()
            process = await connection.create_process(command, encoding=None, window=_LONGEST_LINE)
        except (OSError, ValueError, asyncssh.Error, ConfigError) as error:  # the row's key may be no key
            await self.close()
            raise VisitError(f"ssh to {self._vm.ip_address}: {_text(error)}", is_before_orders=True) from error
        try:
            return await converse(process.stdout, process.stdin, process.stderr, request, decide, is_marked=True)
        finally:
            process.close()

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def _connected(self) -> asyncssh.SSHClientConnection:
        vm = self._vm
        options: dict[str, Any] = {"username": vm.user} if vm.user else {}
        if vm.ssh_key_path:
            options["client_keys"] = [os.path.expanduser(vm.ssh_key_path)]
        async with self._connecting:
            if self._connection is None or self._connection.is_closed():
                connecting = asyncssh.connect(
                    vm.ip_address,
                    port=vm.port,
                    known_hosts=pinned(vm.host_key) if vm.host_key else str(self._known_hosts),
                    config=None,  # use only the row, and no ProxyCommand of a config file
                    keepalive_interval=_KEEPALIVE_S,
                    keepalive_count_max=3,
                    **options,
                )
                self._connection = await asyncio.wait_for(connecting, _CONNECT_S)
            return self._connection


class Reader(Protocol):
    async def readline(self) -> bytes: ...
    async def read(self) -> bytes: ...


class Writer(Protocol):
    def write(self, data: bytes) -> None: ...


async def converse(
    stdout: Reader, stdin: Writer, stderr: Reader, request: Request, decide: Decide, *, is_marked: bool = False
) -> Outcome:
    """Run a visit over the streams of its program. Raises VisitError, with the cause and the last line of stderr.

    `is_marked`: a shell started the program by `marked`; lines printed earlier by the shell are skipped.
    """
    ordered = False
    try:
        stdin.write(encode(request))
        line = await stdout.readline()
        while is_marked and line:
            is_marked = line.strip() != MARK.encode()
            line = await stdout.readline()
        if not line:
            raise OSError("its program printed nothing")
        if (orders := await decide(reader(Observation)(line))) is None:
            return Outcome((), (), (), "")
        ordered = True
        stdin.write(encode(orders))
        outcome: Outcome = reader(Outcome)(await stdout.readline()).of(orders)
    except (ValueError, RecursionError, OSError, asyncio.IncompleteReadError, asyncssh.Error) as error:
        said = await _last_line(stderr)
        why = "gave an invalid answer" if isinstance(error, ValueError | RecursionError) else "was cut off"
        cause = str(error) or type(error).__name__
        raise VisitError(f"the visit {why}: {cause}" + (f": {said}" if said else ""), not ordered) from error
    if outcome.problem:
        raise VisitError(outcome.problem, is_before_orders=True)
    return outcome


async def _last_line(stderr: Reader) -> str:
    try:
        said = await asyncio.wait_for(stderr.read(), _STDERR_S)
    except (TimeoutError, OSError, asyncssh.Error):
        return ""
    return next(iter(said.decode(errors="replace").strip().splitlines()[-1:]), "")


def pinned(key: str) -> tuple[list[asyncssh.SSHKey], list[asyncssh.SSHKey], list[asyncssh.SSHKey]]:
    """Return known hosts that trust only `key`, for any address: trusted, CA and revoked keys. Raises ConfigError."""
    try:
        return [asyncssh.import_public_key(key)], [], []
    except asyncssh.KeyImportError as error:
        raise ConfigError(f"host_key = {key!r} must be a public key such as 'ssh-ed25519 AAAA…': {error}.") from error


async def fetch_host_key(address: str, port: int) -> tuple[str, str]:
    """Return the host key that a VM shows, and its fingerprint. Raises ConfigError if it does not answer."""
    try:
        key = await asyncio.wait_for(asyncssh.get_server_host_key(address, port=port, config=None), _CONNECT_S)
    except (OSError, asyncssh.Error, TimeoutError) as error:
        raise ConfigError(
            f"{address}, port {port}, gave no host key: {_text(error)}. Start its sshd, or give the key in --host-key."
        ) from error
    if key is None:
        raise ConfigError(f"{address}, port {port}, has no host key. Give it in --host-key.")
    return key.export_public_key().decode().strip(), key.get_fingerprint()


def _text(error: BaseException) -> str:
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
