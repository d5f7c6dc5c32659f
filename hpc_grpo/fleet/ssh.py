"""A VM over ssh, with a pinned host key: one persistent connection, one session for each visit."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncssh

from hpc_grpo.errors import ConfigError
from hpc_grpo.fleet.machine import LONGEST_LINE, Decide, VisitError, Vm, converse
from hpc_grpo.fleet.messages import Outcome, Request
from hpc_grpo.system.commands import marked

_CONNECT_S = 10.0
_KEEPALIVE_S = 10.0


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
            process = await connection.create_process(command, encoding=None, window=LONGEST_LINE)
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
            options["client_keys"] = [str(Path(vm.ssh_key_path).expanduser())]
        async with self._connecting:
            if self._connection is None or self._connection.is_closed():
                connecting = asyncssh.connect(
                    vm.ip_address,
                    port=vm.port,
                    known_hosts=pinned([vm.host_key], vm.port) if vm.host_key else str(self._known_hosts),
                    config=None,  # Only the row decides, and no ProxyCommand of a config file.
                    keepalive_interval=_KEEPALIVE_S,
                    keepalive_count_max=3,
                    **options,
                )
                self._connection = await asyncio.wait_for(connecting, _CONNECT_S)
            return self._connection


def pinned(keys: Sequence[str], port: int) -> asyncssh.SSHKnownHosts:
    """Return known hosts that trust only these keys, for any address. Raises ConfigError."""
    try:
        for key in keys:
            asyncssh.import_public_key(key)
    except asyncssh.KeyImportError as error:
        raise ConfigError(f"host_key = {keys!r} must be a public key such as 'ssh-ed25519 AAAA…': {error}.") from error
    lines = "".join(f"{pattern} {key.strip()}\n" for key in keys for pattern in ("*", f"[*]:{port}"))
    return asyncssh.import_known_hosts(lines)


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
