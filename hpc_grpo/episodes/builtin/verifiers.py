"""Built-in environment `verifiers:ENV_ID`: an environment of the package `verifiers`, in its own Python.

Runs under the interpreter of `environment.python`. A row is one of the environment's own data set, with prompt, answer
and info. The package asks the model and scores the rollout. This file gives it a client, and returns its reward.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from hpc_grpo.episodes import Turn
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import ENVIRONMENTS


@ENVIRONMENTS.register("verifiers")
class Verifiers:
    """`args` are those of the environment's `load_environment`. Sessions of a process share it, as it is made for."""

    def __init__(self, env_id: str, **args: Any) -> None:
        self._environment = _load(env_id, json.dumps(args))

    async def play(self, row: Mapping[str, Any], seed: int, base_url: str, api_key: str) -> Turn:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            output = await self._environment.run_rollout(dict(row), OpenAIChatCompletionsClient(client), "policy", {})
        if output["error"] is not None:
            raise RuntimeError(str(output["error"]))
        return Turn(reward=output["reward"], metrics=output["metrics"])


@functools.cache
def _load(env_id: str, args: str) -> Any:
    try:
        import verifiers
    except ImportError as error:
        raise ConfigError(
            f"{error}. Set environment.python to a Python that has the package verifiers and the environment {env_id}."
        ) from error
    return verifiers.load_environment(env_id, **json.loads(args))
