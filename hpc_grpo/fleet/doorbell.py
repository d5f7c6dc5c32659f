"""The doorbell: it says that there is a new job, and nothing else. The database is the truth.

A bell that is broken only delays: the dispatcher looks on its own every `sweep_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from hpc_grpo.system.say import say

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

SUBJECT = "jobs.new"
_STREAM = "hpc-grpo-jobs"
_DURABLE = "dispatch"
_CONNECT_S = 2
_FETCH_S = 5.0
_AGAIN_S = 2.0
_BATCH = 500
_ACK_WAIT_S = 60.0


class Doorbell(Protocol):
    """Implemented by Bell, which rings in this process alone, and by NatsBell."""

    def nudge(self) -> None:
        """Wake who waits in this process: GPUs became free."""

    async def ring(self, job_ids: Sequence[str]) -> None:
        """Announce jobs to all controllers."""

    async def wait(self, timeout_s: float) -> list[str]:
        """Return the jobs that were announced, after `timeout_s` at the latest."""

    async def answered(self) -> None:
        """Note that what `wait` returned last has been seen to, and committed."""


class Bell:
    """Rings in this process alone: without NATS, the sweep finds what others submit."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._rung: list[str] = []

    def nudge(self) -> None:
        """See Doorbell."""
        self._event.set()

    async def ring(self, job_ids: Sequence[str]) -> None:
        """See Doorbell."""
        if job_ids:
            self._event.set()

    async def wait(self, timeout_s: float) -> list[str]:
        """See Doorbell."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), timeout_s)
        self._event.clear()
        rung, self._rung = self._rung, []
        return rung

    async def answered(self) -> None:
        """See Doorbell."""

    def _add(self, job_id: str) -> None:
        self._rung.append(job_id)
        self._event.set()


class NatsBell(Bell):
    """A file-backed JetStream work queue on `jobs.new`: a plain publish of a job's id is all that it takes.

    A message is acknowledged after the commit; whoever is killed before that leaves it to another controller.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._client: Client | None = None
        self._arrived: list[Msg] = []
        self._taken: list[Msg] = []
        self._has_told = False

    async def listen(self) -> None:
        """Fetch announcements for ever, whatever becomes of NATS and of its store."""
        import nats.errors
        import nats.js.errors

        while True:
            try:
                await self._fetch_for_ever()
            except (OSError, nats.errors.Error, nats.js.errors.Error) as error:
                if not self._has_told:
                    say(f"NATS does not answer ({type(error).__name__}); the sweep goes on without it.")
                    self._has_told = True
            await self._leave()
            await asyncio.sleep(_AGAIN_S)

    async def wait(self, timeout_s: float) -> list[str]:
        """See Doorbell."""
        rung = await super().wait(timeout_s)
        self._taken, self._arrived = self._arrived, []  # what was not answered comes again
        return rung

    async def ring(self, job_ids: Sequence[str]) -> None:
        """See Doorbell; where NATS is away the sweep finds them, here at once."""
        import nats.errors

        await super().ring(job_ids)
        if self._client is None:  # this process does not listen, or NATS is away
            await announce(self._url, job_ids)
            return
        with contextlib.suppress(OSError, nats.errors.Error):
            for job_id in job_ids:
                await self._client.publish(SUBJECT, job_id.encode())

    async def answered(self) -> None:
        """See Doorbell."""
        import nats.errors

        rung, self._taken = self._taken, []
        for message in rung:
            with contextlib.suppress(OSError, nats.errors.Error):  # it comes again, and finds nothing to do
                await message.ack()

    async def _fetch_for_ever(self) -> None:
        import nats.errors

        self._client = client = await connect(self._url)
        stream = client.jetstream()
        subscription = await _subscribe(stream)
        if self._has_told:
            say("NATS answers again.")
            self._has_told = False
        while client.is_connected:
            try:
                messages = await subscription.fetch(_BATCH, timeout=_FETCH_S)
            except nats.errors.TimeoutError:
                await stream.consumer_info(_STREAM, _DURABLE)  # raises where the store was wiped: begin anew
                continue
            for message in messages:
                self._arrived.append(message)
                self._add(message.data.decode(errors="replace"))

    async def _leave(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):  # the library raises whatever its broken connection did
                await client.close()


async def announce(url: str, job_ids: Sequence[str]) -> bool:
    """Ring once, from a command that ends; False if NATS does not answer: the sweep finds the jobs."""
    import nats.errors

    try:
        client = await connect(url)
        for job_id in job_ids:
            await client.publish(SUBJECT, job_id.encode())
        await client.flush(timeout=_CONNECT_S)
        await client.close()
    except (OSError, nats.errors.Error):
        return False
    return True


async def connect(url: str) -> Client:
    """Connect at once or not at all; the library would try for two minutes. Raises OSError or nats.errors.Error."""
    import nats

    async def quiet(_error: Exception) -> None:
        """Pass over an exception: it comes to the caller as well."""

    # `allow_reconnect` is about connections that were made: a server that is away counts as a reconnect.
    once = {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0}
    return await nats.connect(url, connect_timeout=_CONNECT_S, error_cb=quiet, **once)


async def _subscribe(stream: JetStreamContext) -> JetStreamContext.PullSubscription:
    from nats.js.api import ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

    queue = StreamConfig(
        name=_STREAM, subjects=[SUBJECT], retention=RetentionPolicy.WORK_QUEUE, storage=StorageType.FILE
    )
    await stream.add_stream(queue)
    consumer = ConsumerConfig(ack_wait=_ACK_WAIT_S)
    return await stream.pull_subscribe(SUBJECT, durable=_DURABLE, stream=_STREAM, config=consumer)
