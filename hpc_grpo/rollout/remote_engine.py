"""An engine as the driver holds it: an actor, and the next one in its place when that dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayTaskError

from hpc_grpo.errors import LaunchError, NodesUnavailableError
from hpc_grpo.remote import ActorLostError, Deadline, get_all


class RemoteEngine:
    """`actor` is the engine's Ray actor; another one after `replace`, which `num_restarts` counts."""

    def __init__(self, start: Callable[[], Any], address: str, max_restarts: int) -> None:
        """`start` creates the actor in the engine's own place on the node at `address`."""
        self._start = start
        self._address = address
        self._max_restarts = max_restarts
        self.num_restarts = 0
        self.actor = start()

    def has_died(self, error: ActorLostError) -> bool:
        """Whether the actor that `error` tells of is this engine's present one."""
        return bool(self.actor._actor_id.hex() == error.actor_id)

    def replace(self, deadline: Deadline) -> None:
        """Start another actor where the dead one was and wait until vLLM is up.

        Raises NodesUnavailableError when its node is gone too, LaunchError when it has died too often.
        """
        if not any(node["Alive"] and node["NodeManagerAddress"] == self._address for node in ray.nodes()):
            raise NodesUnavailableError(f"An engine died with its node {self._address}.")
        if self.num_restarts == self._max_restarts:
            raise LaunchError(
                f"An engine on {self._address} died, and engine.max_restarts = {self._max_restarts} were used up. "
                f"The logs in the attempt's folder say of what."
            )
        ray.kill(self.actor)  # it may only be out of reach, and hold the place that the next one needs
        self.num_restarts += 1
        print(f"An engine on {self._address} died; starting another (restart {self.num_restarts}).", flush=True)
        self.actor = self._start()
        try:
            get_all([self.actor.ready.remote()], deadline, "an engine that was started again")
        except (LaunchError, RayTaskError) as error:
            print(f"It did not come up: {error}", flush=True)
            self.replace(deadline)
