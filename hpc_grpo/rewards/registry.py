"""Finds the function behind a reward's name.

A reward is `f(prompts, completions, **fields) -> list[float]`: texts, and for each column of the data set
(and `answer`) a list with one value per completion, as in TRL. `rewards.args` arrive as keyword arguments as
they are, and win over a column of the same name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from hpc_grpo.errors import ConfigError, nearest

RewardFunction = Callable[..., Sequence[float]]

_registered: dict[str, RewardFunction] = {}
_BUILTIN_MODULES = ("correctness", "keyword_match", "strict_format")


def reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """Register the decorated function under `name`."""

    def register(function: RewardFunction) -> RewardFunction:
        if name in _registered:
            raise ConfigError(f"Reward {name!r} is registered already, by {_registered[name].__module__}.")
        _registered[name] = function
        return function

    return register


def resolve_reward(name: str) -> RewardFunction:
    """The function for a built-in name, `module:function` or `path/to/file.py:function`.

    Imports the module. Raises ConfigError when there is no such name, with the built-ins listed, or when the
    module does not import, with its own error.
    """
    module_name, separator, attribute = name.rpartition(":")
    if not separator:
        check_builtin(name)
        return _registered[name]
    module = _import(name, module_name)
    if not hasattr(module, attribute):
        functions = sorted(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
        raise ConfigError(
            f"Reward {name!r}: {module_name} has no {attribute!r}. It has: {', '.join(functions) or 'no functions'}."
        )
    function = getattr(module, attribute)
    if not callable(function):
        raise ConfigError(f"Reward {name!r}: must be a function, but is of type {type(function).__name__}.")
    found: RewardFunction = function
    return found


def builtin_names() -> list[str]:
    for module in _BUILTIN_MODULES:
        importlib.import_module(f"hpc_grpo.rewards.builtin.{module}")
    return sorted(_registered)


def check_builtin(name: str) -> None:
    """Raise ConfigError where a name without a module is that of no reward. Imports nothing of the user's."""
    names = builtin_names()
    if name not in names:
        raise ConfigError(
            f"Reward {name!r} does not exist{nearest(name, names)} Built in: {', '.join(names)}. "
            f"Your own is module:function or path/to/file.py:function."
        )


def _import(name: str, module_name: str) -> ModuleType:
    try:
        if module_name.endswith(".py"):
            return _import_file(name, Path(module_name))
        # A console script's path lacks the working directory. Last, so that it never hides an installed
        # package.
        _append_to_path(Path.cwd())
        return importlib.import_module(module_name)
    except ConfigError:
        raise
    except BaseException as error:
        # SystemExit included: a script without a main guard is an easy mistake to make here.
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"Reward {name!r}: {module_name} does not import: {type(error).__name__}: {error} "
            f"({place.filename}:{place.lineno}). Built in: {', '.join(builtin_names())}."
        ) from error


def _import_file(name: str, path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"Reward {name!r}: there is no file {path}.")
    module_name = f"hpc_grpo_reward_file_{path.stem}_{abs(hash(path)):x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    _append_to_path(path.parent)
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"Reward {name!r}: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses and pickle look their module up by name.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # Raised again: a module that failed half-way must not be found whole by the next import.
        del sys.modules[module_name]
        raise
    return module


def _append_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
