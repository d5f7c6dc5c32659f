"""The doorbell announces a new job, and carries nothing else. The database is the source of truth.

A broken bell only delays: the dispatcher also checks every `sweep_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpc_grpo.system.say import say

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

SUBJECT = "jobs.new"
_CONNECT_S = 2
_PING_S = 5
_AGAIN_S = 2.0


class Bell:
    """Wakes waiting tasks of this process, and with NATS every controller: publishes a job's id on `jobs.new`.

    Stores and acknowledges nothing: the sweep finds jobs whose announcement was lost.
    """

    def __init__(self, url: str = "") -> None:
        """`url` is that of the NATS server, "" to ring only in this process."""
        self._url = url
        self._client: Client | None = None
        self._event = asyncio.Event()
        self._rung: list[str] = []
        self._is_silent = False

    def nudge(self) -> None:
        """Wake the waiting tasks of this process, because GPUs became free."""
        self._event.set()

    async def ring(self, job_ids: Sequence[str]) -> None:
        """Announce jobs to all controllers.

        If NATS is away, this process sweeps at once, and others find the jobs in their sweep.
        """
        self._event.set()
        if self._url and self._client is None:  # this process does not listen, or NATS is away
            await announce(self._url, job_ids)
        elif self._client is not None:
            import nats.errors

            with contextlib.suppress(OSError, nats.errors.Error):
                for job_id in job_ids:
                    await self._client.publish(SUBJECT, job_id.encode())

    async def wait(self, timeout_s: float) -> list[str]:
        """Return the jobs that were announced, after `timeout_s` at the latest."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), timeout_s)
        self._event.clear()
        rung, self._rung = self._rung, []
        return rung

    async def listen(self) -> None:
        """Listen for announcements forever. The library connects again after NATS was away."""
        if not self._url:
            await asyncio.Event().wait()
        import nats

        async def on_message(message: Msg) -> None:
            self._rung.append(message.data.decode(errors="replace"))
            self._event.set()

        async def on_error(error: Exception) -> None:
            if not self._is_silent:
                say(f"NATS does not answer ({type(error).__name__}); the sweep continues without it.")
                self._is_silent = True

        async def on_connection() -> None:
            if self._is_silent:
                say("NATS answers again.")
                self._is_silent = False
            self._event.set()  # for jobs that were announced before

        again: dict[str, Any] = {"max_reconnect_attempts": -1, "reconnect_time_wait": _AGAIN_S}
        again |= {"error_cb": on_error, "reconnected_cb": on_connection}
        self._client = await nats.connect(self._url, connect_timeout=_CONNECT_S, ping_interval=_PING_S, **again)
        try:
            await self._client.subscribe(SUBJECT, cb=on_message)
            await on_connection()
            await asyncio.Event().wait()
        finally:
            with contextlib.suppress(Exception):  # The library may raise any error of its broken connection.
                await self._client.close()
            self._client = None


async def announce(url: str, job_ids: Sequence[str]) -> bool:
    """Ring once, from a command that then ends. Return False if NATS does not answer; the sweep then finds the jobs."""
    import nats.errors

    async def ignore(_error: Exception) -> None:
        """The caller gets the exception as well."""

    # At once or not at all: the library would try for two minutes. A server that is away counts as a reconnect.
    once: dict[str, Any] = {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0}
    try:
        client = await nats.connect(url, connect_timeout=_CONNECT_S, error_cb=ignore, **once)
        for job_id in job_ids:
            await client.publish(SUBJECT, job_id.encode())
        await client.flush(timeout=_CONNECT_S)
        await client.close()
    except (OSError, nats.errors.Error):
        return False
    return True
