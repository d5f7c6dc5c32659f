"""Creates the environment that a config names: a built-in of this folder, or the user's class.

An environment's process calls `environment_of`; a login node calls `check_built_in`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import ENVIRONMENTS

if TYPE_CHECKING:
    from hpc_grpo.config.rollout import EnvironmentConfig


def environment_of(name: str, args: Mapping[str, Any]) -> Any:
    """Return a new environment. `textarena:Sokoban-v0` is the built-in textarena with Sokoban-v0 as first argument.

    Raises ConfigError if the environment does not exist, or does not accept the arguments.
    """
    built_in, _, first = name.partition(":")
    is_built_in = built_in in ENVIRONMENTS.names()
    words = [first] if is_built_in and first else []
    return ENVIRONMENTS.with_args(built_in if is_built_in else name, args, len(words))(*words)


def check_built_in(environment: EnvironmentConfig) -> None:
    """Raise ConfigError for errors in a built-in that a login node can detect. The job checks the user's files."""
    args: dict[str, Any] = {**environment.args}
    if given := args.get("tools"):
        args["tools"] = [tool for tool in given if ":" not in tool]
    is_built_in = environment.name.partition(":")[0] in ENVIRONMENTS.names()
    if environment.python is not None or not is_built_in or (given and not args["tools"]):
        return
    longest_s = getattr(environment_of(environment.name, args), "longest_step_s", 0.0)
    if longest_s >= environment.timeout_s:
        raise ConfigError(
            f"environment.timeout_s is {environment.timeout_s:g}, and a step of {environment.name} may take "
            f"{longest_s:g} s. A late step masks its episode. Raise environment.timeout_s, or lower seconds in "
            f"environment.args."
        )
