"""The doorbell with a real nats-server, which `make machines-install` installs."""

from __future__ import annotations

import asyncio
import socket
import subprocess

import pytest

from hpc_grpo.fleet.doorbell import NatsBell, announce

pytestmark = pytest.mark.places


def test_an_announcement_wakes_every_controller_and_one_that_nobody_heard_is_the_sweeps() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"nats://127.0.0.1:{port}"

    async def hear() -> list[list[str]]:
        assert not await announce(url, ["nobody-hears"])
        with subprocess.Popen(["nats-server", "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL) as server:
            bells = [NatsBell(url), NatsBell(url)]
            listening = [asyncio.ensure_future(bell.listen()) for bell in bells]
            try:
                assert [await bell.wait(30.0) for bell in bells] == [[], []]  # they hear from now on: sweep once
                assert await announce(url, ["job-1"])
                return [await bell.wait(30.0) for bell in bells]
            finally:
                for task in listening:
                    task.cancel()
                await asyncio.gather(*listening, return_exceptions=True)
                server.terminate()

    assert asyncio.run(asyncio.wait_for(hear(), 120.0)) == [["job-1"], ["job-1"]]
