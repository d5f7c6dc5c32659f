"""How a WeightSyncError comes through vLLM: its worker processes pass on an exception's words, and not its kind.

The kind matters, since damaged weights end the driver where a failed engine is replaced. So a worker returns a Refusal
as its result, and the engine raises it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_grpo.errors import WeightSyncError


@dataclass(frozen=True)
class Refusal:
    """The words of a WeightSyncError."""

    words: str


def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    """A worker's method that returns a Refusal where `method` raises WeightSyncError."""

    @functools.wraps(method)
    def call(*args: Any) -> Any:
        try:
            return method(*args)
        except WeightSyncError as error:
            return Refusal(str(error))

    return call


def unrefused(results: Sequence[Any]) -> list[Any]:
    """The workers' results; raises the first Refusal among them as the WeightSyncError it was."""
    for result in results:
        if isinstance(result, Refusal):
            raise WeightSyncError(result.words)
    return list(results)
