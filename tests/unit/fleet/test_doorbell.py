"""The doorbell where NATS is away; tests/places has it where a server answers."""

from __future__ import annotations

import asyncio
import socket

from hpc_grpo.fleet.doorbell import Bell, announce


def test_a_nats_that_is_away_holds_nobody_up() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"nats://127.0.0.1:{free.getsockname()[1]}"

        async def ring() -> bool:
            await Bell(url).ring(["job-1"])
            return await announce(url, ["job-1"])

        assert not asyncio.run(asyncio.wait_for(ring(), 30.0))
