"""Asks a server over HTTP on behalf of a reward, and waits while it is away.

A server that restarts, is overloaded or answers slowly is asked again with growing pauses until the call's deadline:
training waits for it, and nothing is scored 0 meanwhile. What no later try could mend is an error at once.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import StringConstraints

from hpc_grpo.errors import ConfigError, RewardAwayError

if TYPE_CHECKING:
    import httpx

HttpUrl = Annotated[str, StringConstraints(pattern=r"^https?://")]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_CONNECT_S = 5.0
_START_S, _RESUME_S = 45.0, 600.0
_MARGIN_S = 0.5
"""Between our last try and the deadline at which the worker is killed: what was wrong is told before."""

_REFUSALS = {401: "the key was refused", 403: "the key has no access", 404: "there is nothing at this address"}


class AnswerError(Exception):
    """The server did not answer in time, or refused this request: no verdict on the completion."""


class UnansweredError(AnswerError, TimeoutError):
    """The server did not answer in time."""


@dataclass(frozen=True)
class Endpoint:
    """Says where to ask; `attempt_s` bounds one try.

    `api_key_env` names the environment variable with a key, which is sent to the server. `token_env` names that with
    the token of an `hpc-grpo reward-server`, which both sides prove and nobody sends.
    """

    url: str
    api_key_env: str | None
    concurrency: int
    attempt_s: float
    token_env: str | None = None

    def check(self) -> None:
        """Raise ConfigError for a key or token that is not there, and for a token beside what does not take one."""
        for key, variable in (("api_key_env", self.api_key_env), ("token_env", self.token_env)):
            if variable and not os.environ.get(variable):
                raise ConfigError(
                    f"{key} names the environment variable {variable}, which is not set where rewards run. "
                    f"Export it, and name it in launch.pass_env."
                )
        if self.token_env and (self.api_key_env or not self.url.startswith("http://")):
            raise ConfigError(
                f"token_env = {self.token_env} is for an hpc-grpo reward-server: url = {self.url!r} must begin with "
                f"http://, and api_key_env must be left out."
            )

    def headers(self) -> dict[str, str]:
        """Return the key as a bearer token; it is read when it is used and kept nowhere."""
        return {"Authorization": f"Bearer {os.environ[self.api_key_env]}"} if self.api_key_env else {}


def load() -> None:
    import httpx  # noqa: F401


def open_client(endpoint: Endpoint) -> httpx.AsyncClient:
    """Return a client for the server. Proxies of the environment are for https alone: they could read the rest."""
    import httpx

    if endpoint.token_env:
        from hpc_grpo.rewards.proved import ProvedTransport

        return httpx.AsyncClient(transport=ProvedTransport(os.environ[endpoint.token_env].encode()))
    return httpx.AsyncClient(headers=endpoint.headers(), trust_env=endpoint.url.startswith("https://"))


async def ask_all(endpoint: Endpoint, path: str, bodies: Sequence[Any], timeout_s: float) -> list[Any]:
    """Post each body and return the JSON of the answers, at most `concurrency` at a time.

    Raises ConfigError where the server refuses for good, AnswerError where one is not answered within `timeout_s`.
    """

    endpoint.check()
    deadline = time.monotonic() + timeout_s - _MARGIN_S
    gate = asyncio.Semaphore(endpoint.concurrency)
    async with open_client(endpoint) as client:

        async def ask(body: Any) -> Any:
            async with gate:
                return await _ask(client, endpoint, "POST", path, body, deadline)

        return await asyncio.gather(*map(ask, bodies))


async def wait_for(endpoint: Endpoint, path: str, timeout_s: float, *, is_resume: bool) -> Any:
    """Wait until the server answers a GET, and return its JSON; None where it has nothing at `path`, but answers.

    Not for long, whatever `timeout_s`: nodes are held, and before a run somebody may still be there to mend it; raises
    ConfigError then. At a resume it answered before, and is likely to come back: ten minutes, then RewardAwayError.
    """

    endpoint.check()
    timeout_s = _RESUME_S if is_resume else min(timeout_s, _START_S)
    async with open_client(endpoint) as client:
        try:
            return await _ask(client, endpoint, "GET", path, None, time.monotonic() + timeout_s)
        except AnswerError as error:
            if is_resume:
                raise RewardAwayError(f"{error} It did when the run began: start it, and the run goes on.") from error
            raise ConfigError(f"{error} Start the server before the run, or set rewards.N.args.url.") from error


async def _ask(
    client: httpx.AsyncClient, endpoint: Endpoint, method: str, path: str, body: Any, deadline: float
) -> Any:
    import httpx

    url, pause_s, tries = endpoint.url.rstrip("/") + path, _FIRST_PAUSE_S, 0
    while True:
        tries += 1
        left_s = max(deadline - time.monotonic(), 0.01)
        timeout = httpx.Timeout(min(endpoint.attempt_s, left_s), connect=min(_CONNECT_S, left_s))
        try:
            response = await client.request(method, url, json=body, timeout=timeout)
        except httpx.TransportError as error:
            wrong = f"{type(error).__name__}: {error}".rstrip(": ")
        else:
            if response.is_success:
                return _json_of(response, url)
            wrong = f"status {response.status_code}"
            if response.status_code < 500 and response.status_code not in (408, 425, 429):
                return _refused(response, method, url)
            asked = response.headers.get("Retry-After", "")  # seconds, or a date
            pause_s = max(pause_s, float(asked) if asked.isdecimal() else 0.0)
        pause_s = min(pause_s, _LONGEST_PAUSE_S) * random.uniform(0.75, 1.25)
        if time.monotonic() + pause_s >= deadline:
            raise UnansweredError(f"{url} did not answer within the call's deadline, in {tries} tries: {wrong}.")
        await asyncio.sleep(pause_s)
        pause_s *= 2


def _refused(response: httpx.Response, method: str, url: str) -> None:
    """Raise for a refusal; a server without a page for its health is alive all the same."""
    if method == "GET" and response.status_code in (404, 405):
        return
    if why := _REFUSALS.get(response.status_code):
        raise ConfigError(
            f"{url} answers {response.status_code}: {why}. Look at url and api_key_env, or token_env "
            f"where `hpc-grpo reward-server` is asked."
        )
    raise AnswerError(f"{url} answers {response.status_code}: {response.text[:500]}")


def _json_of(response: httpx.Response, url: str) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise AnswerError(f"{url} answers with what is no JSON: {response.text[:200]!r}") from error
