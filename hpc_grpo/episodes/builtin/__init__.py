"""Makes the environment that a config names: a built-in of this folder, or the user's own class.

An environment worker calls `environment_of` for each session. The login node calls `check_environment`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpc_grpo.config.environment import EnvironmentConfig
from hpc_grpo.episodes import Environment
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import ENVIRONMENTS


def environment_of(name: str, args: Mapping[str, Any], tools: Sequence[str] = ()) -> Environment:
    """Return a new environment. `textarena:Sokoban-v0` is the built-in textarena with Sokoban-v0 as first argument.

    Raises ConfigError where there is no such environment, or where it does not take the arguments.
    """
    built_in, _, first = name.partition(":")
    is_built_in = built_in in ENVIRONMENTS.names()
    made: Callable[..., Any] = ENVIRONMENTS.find(built_in if is_built_in else name)
    words = (first,) if is_built_in and first else ()
    named = {**args, **({"tools": tools} if tools else {})}
    try:
        inspect.signature(made).bind(*words, **named)
    except TypeError as error:
        valid = [str(each) for each in inspect.signature(made).parameters.values()][len(words) :]
        raise ConfigError(
            f"environment.name {name!r} does not take environment.args {sorted(named)}: {error}. "
            f"It takes: {', '.join(valid) or 'nothing'}. Change environment.args."
        ) from None
    environment: Environment = made(*words, **named)
    return environment


def check_environment(config: EnvironmentConfig) -> None:
    """Raise ConfigError for what a login node can see: it makes a built-in, and imports no file of the user's."""
    if config.name.partition(":")[0] not in ENVIRONMENTS.names():
        ENVIRONMENTS.check(config.name)
        return
    tools = [tool for tool in config.tools if ":" not in tool]
    if config.tools and not tools:
        return
    longest_s = getattr(environment_of(config.name, config.args, tools), "longest_step_s", 0.0)
    if longest_s >= config.timeout_s:
        raise ConfigError(
            f"environment.timeout_s is {config.timeout_s:g}, and a call of {config.name} may take {longest_s:g} s. Raise "
            f"environment.timeout_s, or lower the seconds in environment.args: a late answer masks the episode."
        )
