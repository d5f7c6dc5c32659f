"""Engines that outlive their driver: the next one in the same Ray goes on with them, and need not start vLLM.

Where a supervisor starts a crashed driver again, engines and the reservations of nodes are detached: Ray keeps them
when the driver's process is gone, learners and graders not. The next driver finds them by their names, and takes those
that answer in time, have the same config and no failure. What they were sampling for the driver before is ended, their
caches are emptied, and the first publish brings them the weights of the checkpoint, as it does to engines that are new.
They end with Ray, which the supervisor ends with the attempt, whoever else is dead by then.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util import get_placement_group, list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group

from hpc_grpo.config import Config
from hpc_grpo.config.resources import Bundle
from hpc_grpo.driver.remote import first_error
from hpc_grpo.run.contract import KEEPS_ENGINES_VARIABLE

_ANSWER_S = 10.0
"""Longer than a step of vLLM: an engine that takes more time may hang, in a publish whose learner is dead say."""

_STRATEGY = "STRICT_PACK"


def keeps_engines(config: Config) -> bool:
    """Tell whether engines outlive this driver. Not where they share GPUs with learners, which need them empty."""
    return os.environ.get(KEEPS_ENGINES_VARIABLE) == "1" and not config.placement.colocate


def reserved(config: Config, address: str, bundles: Sequence[Bundle]) -> PlacementGroup:
    """Reserve bundles of the node at `address`; where the driver before did so, return its reservation."""
    if not keeps_engines(config):
        return placement_group(list(bundles), strategy=_STRATEGY)
    try:
        return get_placement_group(f"node {address}")
    except ValueError:  # there is none: this driver is the first
        return placement_group(list(bundles), strategy=_STRATEGY, name=f"node {address}", lifetime="detached")


class KeptEngines:
    """The engines that the driver before has left, by their place: node and index."""

    def __init__(self, config: Config, *, trains: bool = True) -> None:
        """Take those that can go on, and end the others. An eval `trains` nothing: its engines are none of another."""
        self._is_on = trains and keeps_engines(config)
        self._engines = _taken(config) if self._is_on else {}

    def __len__(self) -> int:
        return len(self._engines)

    def take(self, address: str, index: int) -> Any:
        """Return the engine of that place, once; None where none was left."""
        return self._engines.pop(_place(address, index), None)

    def options(self, address: str, index: int) -> dict[str, str]:
        """Return the options of an actor by which the next driver finds it; of two in a place each has a name."""
        name = f"{_place(address, index)} {secrets.token_hex(4)}"
        return {"name": name, "lifetime": "detached"} if self._is_on else {}


def _place(address: str, index: int) -> str:
    return f"engine {address} {index}"


def _taken(config: Config) -> dict[str, Any]:
    """Ask every engine to go on for this driver; return those that do, by place."""
    found = _left_engines()
    asked = {name: engine.serve_next.remote(config) for name, engine in found.items()}
    answered = set[Any]()
    if asked:
        answered = set(ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_S)[0])
    taken: dict[str, Any] = {}
    for name, engine in found.items():
        place = name.rpartition(" ")[0]
        if asked[name] in answered and place not in taken and first_error([asked[name]], 0.0) is None:
            taken[place] = engine
        else:
            ray.kill(engine)
    if found:
        print(f"Going on with {len(taken)} of the {len(found)} engines of the driver before.", flush=True)
    return taken


def _left_engines() -> dict[str, Any]:
    """Return by name the engines that are there; one may die after it was listed."""
    found: dict[str, Any] = {}
    for name in list_named_actors():
        if name.startswith("engine "):
            with suppress(ValueError):
                found[name] = ray.get_actor(name)
    return found
