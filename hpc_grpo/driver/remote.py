"""The driver's connection to Ray: connects, and waits for calls of actors.

A wait ends at the first failure, and raises the error that the actor raised.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from hpc_grpo.errors import EXIT_COMPLETE, EXIT_RESUMABLE, HpcGrpoError, LaunchError
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.pulse import PULSE
from hpc_grpo.run.source import PACKAGE, runs_from_copy
from hpc_grpo.run.stacks import dump_stacks_on_signal


class ActorLostError(LaunchError):
    """An actor's process died."""


@dataclass(frozen=True)
class Deadline:
    """The longest time to wait. `key` names the setting in error texts."""

    seconds: float
    key: str


def run_driver(body: Callable[[RunDir], bool]) -> int:
    """Run `body` on the folder of the command line; `body` returns whether it is complete. Return the exit code.

    Prints an HpcGrpoError and returns its exit code. Disconnects from Ray in any case.
    """
    dump_stacks_on_signal("driver")
    try:
        return EXIT_COMPLETE if body(RunDir(Path(sys.argv[1]))) else EXIT_RESUMABLE
    except HpcGrpoError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        ray.shutdown()


def connect(address: str | None) -> None:
    """Connect to Ray such that Ray's workers import this package from the same path as the driver.

    Ray puts the current folder, often a checkout, first on the workers' search path. So if this package runs from a
    copy, this function connects from the folder of the copy.
    """
    with contextlib.chdir(PACKAGE.parent) if runs_from_copy() else contextlib.nullcontext():
        ray.init(address=address, log_to_driver=False, configure_logging=False, namespace="hpc-grpo")


def get_all(references: Sequence[Any], deadline: Deadline | None, waiting_for: str) -> list[Any]:
    """Wait for all calls and return their values in order.

    Raises the first error at once and does not wait for the other calls: in a collective they may hang. Raises an
    HpcGrpoError of the actor unchanged, and ActorLostError if the actor, or an actor whose result it needed, died.
    Other errors are Ray's. Raises LaunchError after the deadline.
    """
    num_ended = 0
    for reference in _as_they_end(references, None if deadline is None else deadline.seconds):
        if error := _error_of(reference):
            _raise(error, waiting_for)
        PULSE.beat()
        num_ended += 1
    if deadline is not None and num_ended < len(references):
        waited = f"Waited {deadline.seconds:.0f} s ({deadline.key}) for {waiting_for}"
        raise LaunchError(f"{waited}; {len(references) - num_ended} did not answer.")
    return [ray.get(reference) for reference in references]


def _as_they_end(references: Sequence[Any], timeout_s: float | None) -> Iterator[Any]:
    """Yield the calls that succeed or fail before the timeout, in the order in which they end."""
    ends_at = None if timeout_s is None else time.monotonic() + timeout_s
    pending = list(references)
    while done := ended(pending, None if ends_at is None else max(ends_at - time.monotonic(), 0.0)):
        yield from done
        done_set = set(done)
        pending = [reference for reference in pending if reference not in done_set]


def ended(references: Sequence[Any], timeout_s: float | None) -> list[Any]:
    """Wait until one of the calls succeeds or fails. Return all ended calls; [] after the timeout."""
    done, pending = ray.wait(list(references), num_returns=1, timeout=timeout_s) if references else ([], [])
    # Take all ended calls at once: the cost of each wait grows with the number of references.
    more, _ = ray.wait(pending, num_returns=len(pending), timeout=0.0) if done and pending else ([], [])
    return [*done, *more]


def errors_in_time(references: Sequence[Any], timeout_s: float | None) -> dict[Any, Exception]:
    """Return the errors of the calls that fail before the timeout, the first failure first.

    An error is the actor's own. If an argument of the call failed, it is the error of the argument's actor.
    """
    found = ((reference, _error_of(reference)) for reference in _as_they_end(references, timeout_s))
    return {reference: as_raised(error) for reference, error in found if error}


def as_raised(error: Exception) -> Exception:
    cause: Exception = error.cause if isinstance(error, RayTaskError) else error
    return cause


def death(cause: Exception) -> str:
    """Return how the actor of a call died, for an error text; "" if the call ended with another error."""
    if isinstance(cause, OutOfMemoryError):
        return "was killed to free memory"
    return "died" if isinstance(cause, RayActorError | ActorLostError) else ""


def _error_of(reference: Any) -> RayError | None:
    try:
        ray.get(reference)
    except RayError as error:
        return error
    return None


def _raise(error: RayError, waiting_for: str) -> None:
    cause = as_raised(error)
    if isinstance(cause, HpcGrpoError):
        raise cause from error
    if isinstance(cause, OutOfMemoryError):  # its text is a page: every process of the node
        reason, _, _ = str(cause).partition("\n")
        raise ActorLostError(f"A process was killed during {waiting_for} to free memory: {reason}") from error
    if death(cause):
        raise ActorLostError(f"A process died during {waiting_for}: {cause}") from error
    raise error
