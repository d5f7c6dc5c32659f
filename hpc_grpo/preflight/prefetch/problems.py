"""What a failed download means, in one line with the fix.

Each library raises errors of its own for the same few causes; they are told apart by the chain of errors.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from hpc_grpo.preflight.prefetch.items import Item

_HTTP_PACKAGES = ("httpx", "httpx2", "requests", "urllib3", "aiohttp")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TOKEN = (
    "export HF_TOKEN (its value reaches the job by name and is written nowhere; launch.env refuses it), or log in with "
    "`hf auth login`"
)


def problem(item: Item, error: BaseException) -> str:
    """`error` from fetching `item`, in one line."""
    chain = list(_chain(error))
    if _is_gated(chain):
        return f"{item} is gated: accept its terms on the hub with your account, then {_TOKEN}."
    if _is_full(chain):
        return (
            f"{item}: the disk (or your quota) of the cache is full. Free some space, or name another folder that all "
            f"nodes share: launch.env.HF_HOME=FOLDER."
        )
    if _is_unknown(chain):
        return (
            f"{item}: the hub has nothing of this name, or not for you, and there is no such folder here. "
            f"Check the spelling; for a private one, {_TOKEN}."
        )
    if (status := _http_status(chain)) is not None:
        todo = _TOKEN if status in (401, 403) else "try again later"
        return f"{item}: the hub answered with HTTP {status} ({_first_line(chain[-1])}); {todo}."
    if (cause := _network_error(chain)) is not None:
        return (
            f"{item}: no network, the hub cannot be reached from this machine ({_first_line(cause)}). "
            f"Run prefetch where there is one: on a login node; behind a proxy, with https_proxy set."
        )
    return _first_line(error) if str(item) in str(error) else f"{item} could not be fetched: {_first_line(error)}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_gated(chain: list[BaseException]) -> bool:
    names = {type(error).__name__ for error in chain}
    # datasets tells a gated data set from a missing one in words only.
    told = any(type(error).__name__ == "DatasetNotFoundError" and "gated" in str(error) for error in chain)
    return "GatedRepoError" in names or told


def _is_unknown(chain: list[BaseException]) -> bool:
    return not {type(error).__name__ for error in chain}.isdisjoint({"RepositoryNotFoundError", "DatasetNotFoundError"})


def _is_full(chain: list[BaseException]) -> bool:
    in_words = any(isinstance(error, OSError) and "Not enough disk space" in str(error) for error in chain)
    return in_words or any(isinstance(error, OSError) and error.errno in _FULL for error in chain)


def _http_status(chain: list[BaseException]) -> int | None:
    """What the hub answered, where it did: a refusal is no lack of a network."""
    responses = (getattr(error, "response", None) for error in chain)
    return next((int(answer.status_code) for answer in responses if answer is not None), None)


def _network_error(chain: list[BaseException]) -> BaseException | None:
    """The innermost error that says there is no connection."""
    found = [
        error
        for error in chain
        if isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.split(".")[0] in _HTTP_PACKAGES
    ]
    return found[-1] if found else None


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
