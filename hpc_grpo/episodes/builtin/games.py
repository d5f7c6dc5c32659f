"""Built-in environments `textarena:GAME`, `reasoning_gym:TASK` and `verifiers:ENV_ID`, for the packages of these names.

`verifiers` runs under the interpreter of `environment.python`. This file therefore imports no other package at its top.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from hpc_grpo.episodes import Turn
from hpc_grpo.errors import ConfigError, nearest
from hpc_grpo.registry import ENVIRONMENTS, REWARDS
from hpc_grpo.rewards import Group

OFFLINE_GAMES = "2048 Blackjack FrozenLake GuessTheNumber Mastermind Minesweeper Sokoban TowerOfHanoi"
"""Names, without -v0, of some games of one player that need no network."""
_MAX_CHARS = 4000
"""Length of a message's end that is searched for the move. Python parses no number of more than 4300 digits."""


@ENVIRONMENTS.register("textarena")
class TextArena:
    """A game of one player. `args` are the arguments of the game. The game's reward comes at its end.

    The model sees only what is new. Each session has its own state of Python's random numbers (`episodes/host.py`).
    """

    def __init__(self, game: str, **args: Any) -> None:
        if find_spec("textarena") is None:
            raise ConfigError("the package textarena is missing. Install hpc-grpo[episodes].")
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        games = [name.removesuffix("-raw") for name in ENV_REGISTRY if name.endswith("-raw")]
        if game not in games:
            raise ConfigError(
                f"environment.name: textarena has no game {game!r}{nearest(game, games)} Games of one player that need "
                f"no network: {', '.join(f'{name}-v0' for name in OFFLINE_GAMES.split())}. The keys of "
                f"textarena.envs.registration.ENV_REGISTRY are all games."
            )
        self._own_move = textarena.ObservationType.PLAYER_ACTION
        try:
            self._game = textarena.make(f"{game}-raw", **args)
            self.reset({}, 0)
        except (Exception, SystemExit) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ConfigError(
                f"environment.name: the game {game} cannot be played with environment.args {args}: {why}. Some games "
                f"need a network, other data or more players."
            ) from error
        if not isinstance(self._game.state, textarena.SinglePlayerState):
            raise ConfigError(f"environment.name: the game {game} is not for one player. Name another game.")

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self._game.reset(num_players=1, seed=seed)
        return self._news()

    def step(self, message: str) -> Turn:
        """Make a move. A reward that is not a number counts as 0: some games return a text for a wrong move."""
        done, _ = self._game.step(message[-_MAX_CHARS:])
        if not done:
            return Turn(self._news())
        rewards, info = self._game.close()
        reward = float(rewards[0]) if isinstance(rewards[0], int | float) else 0.0
        return Turn(reward=reward, done=True, metrics={"invalid_moves": float(info[0]["invalid_move"])})

    def _news(self) -> str:
        _, observations = self._game.get_observation()
        return "\n".join(str(each[1]) for each in observations if self._own_move not in each)


@ENVIRONMENTS.register("reasoning_gym")
class ReasoningGym:
    """Rows of the data source `reasoning_gym:TASK`, with several tries. The row's question is the prompt.

    The task's scorer judges each answer (the reward `reasoning_gym`, which finds the answer in a message). A full score
    or the last try ends the episode. The reward is the score of the last answer, times `discount` for each earlier try.
    `settings` are the args of the reward, such as `partial`.
    """

    def __init__(
        self,
        task: str = "",
        tries: int = 2,
        feedback: str = "That is not right. Try again.",
        discount: float = 1.0,
        **settings: Any,
    ) -> None:
        from hpc_grpo.config import RewardConfig

        if find_spec("reasoning_gym") is None:
            raise ConfigError("the package reasoning-gym is missing. Install hpc-grpo[tasks].")
        if tries < 1:
            raise ConfigError(f"environment.args.tries is {tries}. It must be at least 1.")
        self._score = REWARDS.find("reasoning_gym")
        self._settings = RewardConfig(name="reasoning_gym", args=settings).settings("environment")
        self._task, self._tries, self._feedback, self._discount = task, tries, feedback, discount

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        if self._task and row.get("task") != self._task:
            raise ConfigError(
                f"the environment reasoning_gym:{self._task} plays rows of data.train.path reasoning_gym:{self._task}, "
                f"and this row has the task {row.get('task')!r}."
            )
        self._row, self._tried = row, 0

    def step(self, message: str) -> Turn:
        [score] = self._score(Group("", (message,), self._row), self._settings)
        self._tried += 1
        if score < 1.0 and self._tried < self._tries:
            return Turn(self._feedback, metrics={"tries": 1.0})
        return Turn(reward=score * self._discount ** (self._tried - 1), done=True, metrics={"tries": 1.0})


@ENVIRONMENTS.register("verifiers")
class Verifiers:
    """An environment of the package verifiers. It calls the model through a client, and scores the rollout.

    `args` are the arguments of `load_environment`. The sessions of a process share one environment: verifiers supports
    this. A row comes from the environment's own data set, with prompt, answer and info.
    """

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
