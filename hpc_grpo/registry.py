"""Finds what a config names: rewards, algorithms and data sources, built-in or the user's.

A built-in registers itself with a decorator, such as `@ALGORITHMS.register("grpo")`. Each registry lists the modules of
its names below, and imports a module when one of its names is requested.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from hpc_grpo.errors import ConfigError, described, nearest

Entry = TypeVar("Entry", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parent


class Registry:
    """Finds entries by name: built-ins and users' own. `kind` is the word for an entry in error texts.

    `modules` maps a module of the package to the names of its entries. Without modules there are only users' entries.
    `others` maps names of other systems to ours.
    """

    def __init__(
        self, kind: str, modules: Mapping[str, str] | None = None, others: Mapping[str, str] | None = None
    ) -> None:
        self._kind = kind
        self._modules = {name: module for module, names in (modules or {}).items() for name in names.split()}
        self._others = others or {}
        self._entries: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Return a decorator that registers the built-in `name`. It raises ConfigError if the name is taken."""

        def add(entry: Entry) -> Entry:
            if name in self._entries:
                raise ConfigError(f"{self._kind} {name!r} is registered already, by {self._entries[name].__module__}.")
            self._entries[name] = entry
            return entry

        return add

    def names(self) -> list[str]:
        """List the built-ins and other registered names, without imports."""
        return sorted(self._modules.keys() | self._entries.keys())

    def check(self, name: str) -> None:
        """Raise ConfigError if `name` is not a built-in. Ignores `module:function`, which the job imports."""
        names = self.names()
        module, dot, function = name.rpartition("::" if "::" in name else ".")
        if function == "py":
            module, function = name, "FUNCTION"
        if "::" in name or (":" not in name and dot and any(map(Path.is_file, (Path(module), Path(f"{module}.py"))))):
            raise ConfigError(
                f"{self._kind} {name!r}: one colon must separate the file or module from the function. "
                f"Write {module}:{function}."
            )
        if ":" not in name and name not in names:
            raise ConfigError(
                f"{self._kind} {name!r} does not exist{nearest(name, [*names, *self._others], self._others)} "
                f"Built in: {', '.join(names)}. Or name your own: module:function or path/to/file.py:function."
            )

    def find(self, name: str) -> Any:
        """Import and return the entry for a built-in's name, `module:function` or `path/to/file.py:function`.

        Raises ConfigError if there is no such name or the module does not import.
        """
        module_name, separator, attribute = name.rpartition(":")
        if "::" in name:
            self.check(name)
        if not separator:
            if name not in self._entries:
                self.check(name)
                importlib.import_module(f"{__package__}.{self._modules[name]}")
            return self._entries[name]
        module = self._import(name, module_name)
        if not hasattr(module, attribute):
            functions = sorted(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
            raise ConfigError(
                f"{self._kind} {name!r}: {module_name} has no {attribute!r}. "
                f"It has: {', '.join(functions) or 'no functions'}."
            )
        entry = getattr(module, attribute)
        if not callable(entry):
            raise ConfigError(f"{self._kind} {name!r}: must be a function, but is of type {type(entry).__name__}.")
        return entry

    def with_args(self, name: str, args: Mapping[str, Any], num_inputs: int) -> Callable[..., Any]:
        """Return the user's function with keyword arguments. Raises ConfigError if it does not accept them."""
        function = self.find(name)
        try:
            inspect.signature(function).bind(*range(num_inputs), **args)
        except TypeError as error:
            takes = [str(each) for each in inspect.signature(function).parameters.values()][num_inputs:]
            raise ConfigError(
                f"{self._kind} {name!r} is called with {num_inputs} inputs and its args, here: "
                f"{', '.join(args) or 'none'}. It does not take them: {error}. Its args are: "
                f"{', '.join(takes) or 'none'}. Change the function, or the args in the config."
            ) from None
        return partial(function, **args)

    def _import(self, name: str, module_name: str) -> ModuleType:
        try:
            if module_name.endswith(".py"):
                copy = _PACKAGE.parent / copied_as(module_name)  # exists if this process runs from a run's copy
                return _import_file(copy if copy.is_file() else Path(module_name))
            # A console script's path lacks the working directory. Append it: it must not hide an installed package.
            _append_to_path(Path.cwd())
            return importlib.import_module(module_name)
        except ConfigError as error:
            raise ConfigError(f"{self._kind} {name!r}: {error}") from error
        except BaseException as error:
            # Also SystemExit: users name scripts without a main guard.
            if isinstance(error, ModuleNotFoundError) and error.name == module_name:
                raise ConfigError(
                    f"{self._kind} {name!r}: there is no {module_name}.py in {Path.cwd()}, and no package "
                    f"{module_name}. A file elsewhere is named by its path: path/to/{module_name}.py:FUNCTION."
                ) from None
            raise ConfigError(
                f"{self._kind} {name!r}: {module_name} does not import: {described(error)}. Correct the module."
            ) from error


ALGORITHMS = Registry("Algorithm", {"algorithms.tasks": "distill grpo ppo sft"})
LOSSES = Registry("Loss")
CORRECTIONS = Registry("Correction")
ADVANTAGES = Registry("Advantage")
REWARDS = Registry(
    "Reward",
    {
        "rewards.builtin.code": "code",
        "rewards.builtin.ifeval": "ifeval",
        "rewards.builtin.math": "correctness gsm8k math multiple_choice",
        "rewards.builtin.reasoning_gym": "reasoning_gym",
        "rewards.builtin.servers": "llm_judge remote",
        "rewards.builtin.text": "exact json_schema keyword_match length regex repetition strict_format string_f1",
    },
    {"accuracy_reward": "math", "think_format_reward": "strict_format"},
)
ENVIRONMENTS = Registry(
    "Environment",
    {
        "episodes.builtin.tools": "tools",
        "episodes.builtin.bfcl": "bfcl",
        "episodes.builtin.games": "reasoning_gym textarena verifiers",
    },
)
EVAL_METRICS = Registry("Eval metric")
CALLBACKS = Registry("Callback")
SOURCES = Registry(
    "Data source", {"data.sources": "arrow function hub json jsonl parquet", "data.reasoning_gym": "reasoning_gym"}
)


def names_function(path: str) -> bool:
    """Return whether the path of a data set is a user's function: module:function, path/to/file.py:function.

    >>> [names_function(path) for path in ("my_data:rows", "a/b.py:rows", "reasoning_gym:gcd", "s3://b/c", "d:e.jsonl")]
    [True, True, False, False, False]
    """
    module, _, name = path.rpartition(":")
    is_module = module.endswith(".py") or all(part.isidentifier() for part in module.split("."))
    return is_module and name.isidentifier() and module not in SOURCES.names()


def copied_as(module_name: str) -> Path:
    """Return where a run's copy of the user's file `module_name` lies, relative to the folder with the package."""
    digest = hashlib.blake2b(module_name.encode(), digest_size=4).hexdigest()
    return Path("functions", digest, Path(module_name).name)


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {path}.")
    module_name = f"hpc_grpo_file_{path.stem}_{abs(hash(path)):x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    _append_to_path(path.parent)
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    # Register the module before it runs: dataclasses and pickle look it up by name.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # Raised again. A half-imported module must not be found by the next import.
        del sys.modules[module_name]
        raise
    return module


def _append_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
