"""Rewards: functions of text. The built-ins are in `builtin/`; `hpc_grpo.registry` finds them by name.

A built-in is `f(group, settings)`. `group` holds the completions of one prompt. `settings` holds `rewards.N.args`,
checked when the config is loaded. The function yields one score for each completion, in order; `scoring` limits the
time of each completion. A built-in that calls a server is `async` and returns the list of all scores.

A user's own reward is `f(prompts, completions, **columns) -> list[float]`, as in TRL: one value per completion for each
column of the data set. Its `rewards.N.args` are keyword arguments, and replace a column of the same name. The function
may be `async`. Its attribute `prepare` is called at each start of an attempt, with `rewards.N.args`. `prepare` raises
ConfigError if the reward cannot work, and returns a note for the user, or None.

This file imports only the registry: every worker loads it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import REWARDS

if TYPE_CHECKING:
    from hpc_grpo.section import Section


@dataclass(frozen=True)
class Group:
    """The completions of one prompt.

    `fields` is the row of the data set: a value for each column, `answer` among them. `timeout_s` is
    `rewards.N.timeout_s`. `images` are the bytes of the prompt's image files.
    """

    prompt: str
    completions: tuple[str, ...]
    fields: Mapping[str, Any]
    timeout_s: float = 10.0
    images: tuple[bytes, ...] = ()

    def column(self, name: str, fix: str, *kinds: type) -> Any:
        """Return the row's value of a column.

        Raises ConfigError with `fix` if the column is missing, or its value has none of the types `kinds`. A list or
        null is not converted to text, because no completion would match such a reference.
        """
        if name not in self.fields:
            have = ", ".join(sorted(self.fields)) or "none"
            raise ConfigError(f"the data have no column {name!r}. Columns: {have}. {fix}")
        value = self.fields[name]
        if kinds and not isinstance(value, kinds):
            allowed = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"the column {name!r} holds {value!r:.200}; it must hold {allowed}. {fix}")
        return value

    def column_of(self, settings: Section, key: str, *kinds: type) -> Any:
        """Return the row's value of the column that the setting `key` names."""
        return self.column(getattr(settings, key), f"Set rewards.N.args.{key} to the right column.", *kinds)

    def answer(self, *others: type) -> Any:
        """Return the reference answer: text, a number, or a type in `others`. Raises ConfigError for another type."""
        fix = "Set data.*.answer_field to the column of the reference answer; for reward test, give --answer."
        return self.column("answer", fix, str, int, float, *others)


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward: its function, and the class of its settings.

    `prepare(settings, timeout_s, is_resume)` is called at each start of an attempt. It raises ConfigError if the reward
    cannot work, and returns a note for the user, or None. `load` imports the reward's libraries and their data, once in
    each worker: this time must not count for a completion. If completions run in other processes with their own limits,
    `settings` have no `completion_s`. Scores are between `least` and 1.0: a completion over its limit gets the bound
    that lowers the weighted reward.
    """

    name: str
    function: Callable[[Group, Any], Iterator[float] | Awaitable[Sequence[float]]]
    settings: type[Section]
    prepare: Callable[[Any, float, bool], Any] | None = None
    load: Callable[[], None] | None = None
    least: float = 0.0

    @property
    def is_one_by_one(self) -> bool:
        return inspect.isgeneratorfunction(self.function)

    def __call__(self, group: Group, settings: Section) -> Iterator[float] | Awaitable[Sequence[float]]:
        return self.function(group, settings)


def reward(name: str, settings: type[Section], **options: Any) -> Callable[[Callable[[Group, Any], Any]], BuiltIn]:
    """Decorate a built-in: `@reward("math", MathSettings)` in `builtin/math.py`. `options` are fields of `BuiltIn`."""
    return lambda function: REWARDS.register(name)(BuiltIn(name, function, settings, **options))


def score(
    name: str,
    completions: Sequence[str],
    fields: Mapping[str, Any],
    *,
    prompt: str = "",
    args: Mapping[str, Any] | None = None,
    timeout_s: float = 10.0,
) -> list[float]:
    """Score completions of one row by a built-in. A user's own reward may call this function to build on a built-in.

    `args` and `timeout_s` are those of `rewards.N`. Calls from threads run one after the other. Raises ConfigError for
    settings and data that the built-in refuses, ScoringError if it fails.

    >>> score("math", ["It is 4.", "It is 5."], {"answer": "4"})
    [1.0, 0.0]
    """
    from hpc_grpo.config import RewardConfig
    from hpc_grpo.rewards.scoring import scorer

    built_in: BuiltIn = REWARDS.find(name)
    settings = RewardConfig(name=name, args=dict(args or {})).settings()
    assert settings is not None
    group = Group(prompt, tuple(completions), fields, timeout_s)
    if built_in.is_one_by_one:
        return scorer().score(built_in, settings, group).scores
    return list(finished(built_in(group, settings)))


def finished(value: Any) -> Any:
    """Return a function's result. Runs an awaitable to its end, in another thread if a loop is running."""
    if not inspect.isawaitable(value):
        return value

    import asyncio  # here, because fewer imports make workers start faster

    async def awaited() -> Any:
        return await value

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(awaited())
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, awaited()).result()
