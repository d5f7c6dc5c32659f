"""A VM over ssh: a pinned host key is the only one that is trusted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncssh
import pytest

from hpc_grpo.fleet.machine import SshMachine, VisitError, Vm
from hpc_grpo.fleet.messages import Request


class Open(asyncssh.SSHServer):
    """Lets everybody in; only the host's key is in question."""

    def begin_auth(self, username: str) -> bool:
        return False


def visit(server_key: asyncssh.SSHKey, host_key: str) -> str:
    """Visit a server with `server_key`. Return why the visit failed."""

    async def run() -> str:
        async with asyncssh.listen("127.0.0.1", 0, server_host_keys=[server_key], server_factory=Open) as server:
            vm = Vm(1, "vm", "127.0.0.1", "u", "", server.get_port(), host_key, "ssh", "python3", "work", "nvidia-smi")
            machine = SshMachine(vm, Path("/nonexistent"))
            with pytest.raises(VisitError) as failed:
                await machine.visit(Request("work", "nvidia-smi"), lambda _: pytest.fail("no observation comes"))
            await machine.close()
            return str(failed.value)

    return asyncio.run(asyncio.wait_for(run(), 60.0))


def test_a_host_with_another_key_than_the_pinned_one_is_not_visited() -> None:
    key, other = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    own, theirs = (each.export_public_key().decode() for each in (key, other))
    assert "Host key is not trusted" in visit(key, theirs)
    assert "Session refused" in visit(key, own)  # it is trusted, and this server runs no command
    assert "must be a public key" in visit(key, "ssh-ed25519 AAAA")
