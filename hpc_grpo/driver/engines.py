"""The driver's handle on one engine: its actor, and the next one in its place when that dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from hpc_grpo.driver.remote import ActorLostError, Deadline, as_raised, get_all
from hpc_grpo.errors import EngineLostError, HpcGrpoError, LaunchError, NodesUnavailableError


def is_engine_failure(error: Exception | None) -> bool:
    """Say whether another engine may do better where a call ended with `error`: one that died or ran out of memory.

    An error meant for the user is no such failure: a wrong setting or damaged weights are the next engine's too.
    """
    return error is not None and not isinstance(error, HpcGrpoError)


class RemoteEngine:
    """Holds the engine's Ray actor, another one after each `replace`; `num_restarts` counts those."""

    def __init__(self, start: Callable[[], Any], address: str, max_restarts: int) -> None:
        """`start` creates the actor in the engine's own place on the node at `address`."""
        self._start = start
        self._address = address
        self._max_restarts = max_restarts
        self.num_restarts = 0
        self.actor = start()

    def replace(self, deadline: Deadline, error: Exception) -> None:
        """Start another actor in its place. Raises NodesUnavailableError, or EngineLostError after too many of them."""
        what = f"An engine on {self._address} {_end(error)}"
        if not any(node["Alive"] and node["NodeManagerAddress"] == self._address for node in ray.nodes()):
            raise NodesUnavailableError(f"An engine died with its node {self._address}.")
        if self.num_restarts == self._max_restarts:
            used_up = f"engine.max_restarts = {self._max_restarts} were used up"
            raise EngineLostError(f"{what}, and {used_up}. The logs in the attempt's folder say more.")
        # Alive after an error, or only out of reach, it would hold the place that the next one needs.
        ray.kill(self.actor)
        self.num_restarts += 1
        print(f"{what}; starting another (restart {self.num_restarts}).", flush=True)
        self.actor = self._start()
        try:
            get_all([self.actor.ready.remote()], deadline, "an engine that was started again")
        except (LaunchError, RayTaskError) as next_error:
            print(f"It did not come up: {next_error}", flush=True)
            self.replace(deadline, next_error)


def _end(error: Exception) -> str:
    """Describe what became of an engine, on one line."""
    cause = as_raised(error)
    if isinstance(cause, RayActorError | ActorLostError):
        return "died"
    first_line, _, _ = str(cause).strip().partition("\n")
    return f"raised {type(cause).__name__}: {first_line}"
