"""The driver's handles on an engine and on a grader: the actor, and the next one in its place when that dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from hpc_grpo.driver.remote import Deadline, as_raised, death, get_all
from hpc_grpo.errors import EngineLostError, GraderLostError, HpcGrpoError, LaunchError, NodesUnavailableError
from hpc_grpo.run.pulse import PULSE


def is_engine_failure(error: Exception | None) -> bool:
    """Say whether another engine may do better where a call ended with `error`: one that died or ran out of memory.

    An error meant for the user is no such failure: a wrong setting or damaged weights are the next engine's too.
    """
    return error is not None and not isinstance(error, HpcGrpoError)


class RemoteActor:
    """Holds an actor in a place of its own on a node, another one after each `replace`; `num_restarts` counts those."""

    _what = "An actor"
    _max_restarts_key = ""
    _lost: type[LaunchError] = LaunchError

    def __init__(self, start: Callable[[], Any], address: str, max_restarts: int) -> None:
        """`start` creates the actor in its own place on the node at `address`."""
        self._start = start
        self._address = address
        self._max_restarts = max_restarts
        self._num_counted = 0
        self.num_restarts = 0
        self.actor = start()

    def replace(self, deadline: Deadline, error: Exception) -> None:
        """Start another actor in its place. Raises NodesUnavailableError, or its own error after too many of them."""
        what = f"{self._what} on {self._address} {_end(error)}"
        if not any(node["Alive"] and node["NodeManagerAddress"] == self._address for node in ray.nodes()):
            raise NodesUnavailableError(f"{self._what} died with its node {self._address}.")
        if self._num_counted == self._max_restarts:
            used_up = f"{self._max_restarts_key} = {self._max_restarts} were used up"
            raise self._lost(f"{what}, and {used_up}. The logs in the attempt's folder say more.")
        # Alive after an error, or only out of reach, it would hold the place that the next one needs.
        ray.kill(self.actor)
        self.num_restarts += 1
        self._num_counted += 1
        print(f"{what}; starting another (restart {self.num_restarts}).", flush=True)
        with PULSE.working("start"):
            self.actor = self._start()
            try:
                get_all([self.actor.ready.remote()], deadline, f"{self._what.lower()} that was started again")
                return
            except (LaunchError, RayError) as next_error:
                print(f"It did not come up: {next_error}", flush=True)
                failed = next_error
        self.replace(deadline, failed)


class RemoteEngine(RemoteActor):
    """The handle on an engine. Its restarts are counted over the whole attempt."""

    _what = "An engine"
    _max_restarts_key = "engine.max_restarts"
    _lost = EngineLostError


class RemoteGrader(RemoteActor):
    """The handle on a grader. Only restarts in a row count: one group in a million may kill it, and the next not."""

    _what = "A grader"
    _max_restarts_key = "grading.max_restarts"
    _lost = GraderLostError

    def note_success(self) -> None:
        """Forget the restarts before: it has graded all that it was asked to."""
        self._num_counted = 0


def _end(error: Exception) -> str:
    """Describe what became of an actor, on one line."""
    cause = as_raised(error)
    first_line, _, _ = str(cause).strip().partition("\n")
    return death(cause) or f"raised {type(cause).__name__}: {first_line}"
