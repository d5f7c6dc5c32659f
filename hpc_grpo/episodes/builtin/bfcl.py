"""Built-in environment `bfcl`: the multi-turn tasks of the Berkeley Function Calling Leaderboard (package bfcl-eval).

A user makes several requests, one after the other. For each, the model calls functions of simulated APIs, any number
of times. A message without a call ends the user's turn. The package's checkers then compare the state of the APIs and
the results with those of the task's own calls. The reward is 1 if all turns are right. The first wrong turn ends the
episode.

The package's executor evaluates the model's text, and shares its APIs between runs of a task. This module therefore
calls the documented functions itself, on the episode's own instances. A call that cannot be parsed is answered with an
error; the package would end the user's turn.
"""

from __future__ import annotations

import ast
import copy
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpc_grpo.episodes import Messages, Turn
from hpc_grpo.episodes.builtin.tools import shortened
from hpc_grpo.episodes.calls import arguments_of, calls_of
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import ENVIRONMENTS

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
_MAX_STEPS = 20
_MAX_CALLS = 100
_MAX_CHARS = 20_000
_MOST = {"exponent": 1000, "precision": 1000, "decimal_places": 1000}
"""Limits of numbers, by parameter: the mathematical API would accept calls that run for years."""
_MOST_OF_OTHERS = 10**18
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
_FILE = "BFCL_v4_multi_turn_{}.json"


def tasks(categories: Sequence[str] = CATEGORIES) -> Iterator[dict[str, str]]:
    """Yield the rows for `data.train.path: hpc_grpo.episodes.builtin.bfcl:tasks`."""
    for category in categories:
        if category not in CATEGORIES:
            raise ConfigError(f"bfcl has no category {category!r}. Categories: {', '.join(CATEGORIES)}.")
        yield from ({"id": task["id"]} for task in _read(_FILE.format(category)))


@ENVIRONMENTS.register("bfcl")
class Bfcl:
    """Rows have the `id` of a task, such as `multi_turn_base_0`."""

    def __init__(self) -> None:
        _folder()

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages:
        if row.get("id") not in _tasks():
            raise ConfigError(
                f"the column id has {row.get('id')!r}, which is no multi-turn task of bfcl. Set data.train.path to "
                f"hpc_grpo.episodes.builtin.bfcl:tasks."
            )
        self._task = _tasks()[row["id"]]
        self._apis, self._reference = (Apis(self._task) for _ in range(2))
        later = {name for names in self._task.get("missed_function", {}).values() for name in names}
        self.tools = self._apis.tools(hidden={*later, *self._task.get("excluded_function", ())})
        self._turn, self._num_steps, self._num_judged = 0, 0, 0
        self._results: list[str] = []
        messages: Messages = self._task["question"][0]
        return messages

    def step(self, message: str) -> Turn:
        if not (calls := list(calls_of(message))):
            return self._end_turn()
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS or len(calls) > _MAX_CALLS:
            return Turn(done=True)
        observation = []
        for call in calls:
            arguments = arguments_of(call, self._apis.tools())
            result = f"Error: {call.error}" if call.error else self._apis.call(call.name, arguments)
            observation.append({"role": "tool", "name": call.name, "content": shortened(result, _MAX_CHARS)})
            if not call.error:
                self._results.append(result)
        metrics = {"tool_calls": len(calls), "tool_errors": sum(call.error != "" for call in calls)}
        return Turn(observation, metrics=metrics)

    def _end_turn(self) -> Turn:
        from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING

        if not self._is_right():
            return Turn(done=True)
        self._turn, self._num_steps, self._num_judged = self._turn + 1, 0, len(self._results)
        if self._turn == len(self._task["question"]):
            return Turn(reward=1.0, done=True)
        if names := self._task.get("missed_function", {}).get(str(self._turn)):
            functions = json.dumps([tool for tool in self._apis.tools() if tool["function"]["name"] in names])
            return Turn(DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=functions))
        return Turn(self._task["question"][self._turn])

    def _is_right(self) -> bool:
        """Run the task's own calls of this turn, and compare. A turn without such calls is not judged."""
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker

        calls = self._task["ground_truth"][self._turn]
        expected = [self._reference.call(*self._reference.read(call)) for call in calls]
        if not calls:
            return True
        return bool(
            len(self._results) > self._num_judged
            and state_checker(self._apis.instances, self._reference.instances)["valid"]
            and response_checker(self._results, expected, self._turn)["valid"]
        )


class Apis:
    """The simulated APIs of a task, in their initial state."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        from bfcl_eval.constants import executable_backend_config as package

        self.instances: dict[str, Any] = {}
        self._documents: dict[str, tuple[str, dict[str, Any]]] = {}
        for name in task["involved_classes"]:
            self.instances[name] = getattr(importlib.import_module(package.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in package.STATELESS_CLASSES:
                config = copy.deepcopy(task["initial_config"].get(name, {}))
                self.instances[name]._load_scenario(config, long_context="long_context" in task["id"])
            file = package.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]
            for document in _read(f"multi_turn_func_doc/{file}", _with_json_type):
                self._documents[document["name"]] = name, document

    def tools(self, hidden: set[str] = set()) -> list[dict[str, Any]]:  # noqa: B006
        """Return the functions in the form of chat templates."""
        documents = [each for name, (_, each) in self._documents.items() if name not in hidden]
        keys = ("name", "description", "parameters")
        return [{"type": "function", "function": {key: each[key] for key in keys}} for each in documents]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a function, or its error, in the package's words."""
        if name not in self._documents:
            return f"Error during execution: name {name!r} is not defined"
        try:
            for key, value in arguments.items():
                if isinstance(value, int | float) and abs(value) > _MOST.get(key, _MOST_OF_OTHERS):
                    raise ValueError(f"{key} is too large")
            value = getattr(self.instances[self._documents[name][0]], name)(**arguments)
        except Exception as error:  # noqa: BLE001 - a call may raise anything, and the model sees the error
            return f"Error during execution: {error}"
        try:
            return json.dumps(value) if isinstance(value, dict) else str(value)
        except (TypeError, ValueError):
            return str(value)

    def read(self, call: str) -> tuple[str, dict[str, Any]]:
        """Return the name and the arguments of one of the task's own calls, such as `sort(file_name='a.txt')`."""
        tree = ast.parse(call, mode="eval").body
        assert isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)
        name = tree.func.id
        parameters = self._documents[name][1]["parameters"]["properties"]
        values = [ast.literal_eval(value) for value in tree.args]
        named = {each.arg: ast.literal_eval(each.value) for each in tree.keywords if each.arg}
        return name, dict(zip(parameters, values, strict=False)) | named


def _with_json_type(value: dict[str, Any]) -> dict[str, Any]:
    """Replace the package's name of a type by JSON schema's."""
    name = value.get("type")
    return value | {"type": _TYPES[name]} if isinstance(name, str) and name in _TYPES else value


def _folder() -> Path:
    spec = find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise ConfigError("the package bfcl-eval is missing. Install it alone: pip install --no-deps bfcl-eval")
    return Path(spec.origin).parent / "data"


def _read(name: str, hook: Callable[[dict[str, Any]], Any] | None = None) -> list[dict[str, Any]]:
    lines = (_folder() / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line, object_hook=hook) for line in lines]


@cache
def _tasks() -> dict[str, dict[str, Any]]:
    """Return all tasks by id, with their own calls."""
    files = [_FILE.format(category) for category in CATEGORIES]
    answers = {answer["id"]: answer["ground_truth"] for file in files for answer in _read(f"possible_answer/{file}")}
    return {task["id"]: task | {"ground_truth": answers[task["id"]]} for file in files for task in _read(file)}
