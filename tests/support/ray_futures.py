"""Ray's calls as futures: what the driver waits for, without a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from typing import Any

from ray.exceptions import RayError, RayTaskError

Reference = Future[Any]


class FakeRay:
    """Stands in for the module `ray`: waits on futures, and notes what the driver fetches."""

    def __init__(self) -> None:
        self.fetched: list[Any] = []

    def wait(
        self, references: Sequence[Reference], num_returns: int, timeout: float | None, fetch_local: bool = True
    ) -> Any:
        done = wait(references, timeout, return_when=FIRST_COMPLETED if num_returns == 1 else ALL_COMPLETED).done
        first = [reference for reference in references if reference in done][:num_returns]
        return first, [reference for reference in references if reference not in first]

    def get(self, reference: Reference) -> Any:
        self.fetched.append(reference.result())
        return self.fetched[-1]


def answered(outcome: Any) -> Reference:
    """A call's reference: its value, its actor's death, or what it raised as Ray hands that over."""
    reference: Reference = Future()
    if isinstance(outcome, RayError):
        reference.set_exception(outcome)
    elif isinstance(outcome, Exception):
        reference.set_exception(RayTaskError("call", "traceback", outcome).as_instanceof_cause())
    else:
        reference.set_result(outcome)
    return reference


def sampled(samples: Reference) -> tuple[Reference, Reference]:
    """What an engine's `samples` gives: its reference, and one that ends with it and holds nothing."""
    ended: Reference = Future()

    def end(_: Reference) -> None:
        if error := samples.exception():
            ended.set_exception(error)
        else:
            ended.set_result(None)

    samples.add_done_callback(end)
    return samples, ended
