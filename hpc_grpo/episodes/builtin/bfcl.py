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
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpc_grpo.episodes import Messages, Turn
from hpc_grpo.episodes.builtin.tools import shortened
from hpc_grpo.episodes.calls import calls_of
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


def tasks(categories: Sequence[str] = CATEGORIES) -> Iterator[dict[str, str]]:
    """Yield the rows for `data.train.path: hpc_grpo.episodes.builtin.bfcl:tasks`."""
    for category in categories:
        if category not in CATEGORIES:
            raise ConfigError(f"bfcl has no category {category!r}. Categories: {', '.join(CATEGORIES)}.")
        yield from ({"id": task["id"]} for task in _read(f"BFCL_v4_multi_turn_{category}.json"))


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
        self._turn, self._num_steps, self._num_read = 0, 0, 0
        self._results: list[str] = []
        messages: Messages = self._task["question"][0]
        return messages

    def step(self, message: str) -> Turn:
        if not (calls := list(calls_of(message))):
            return self._end_turn()
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS or len(calls) > _MAX_CALLS:
            return Turn(done=True)
        observation, num_errors = [], 0
        for call in calls:
            result = f"Error: {call.error}"
            if call.error:
                num_errors += 1
            else:
                self._num_read += 1
                result = self._apis.call(call.name, call.arguments)
                self._results.append(result)
            observation.append({"role": "tool", "name": call.name, "content": shortened(result, _MAX_CHARS)})
        return Turn(observation, metrics={"tool_calls": len(calls), "tool_errors": num_errors})

    def _end_turn(self) -> Turn:
        from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING

        if not self._is_right():
            return Turn(done=True)
        self._turn, self._num_steps, self._num_read = self._turn + 1, 0, 0
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
            self._num_read
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
            for document in _read(f"multi_turn_func_doc/{package.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]}"):
                self._documents[document["name"]] = name, document

    def tools(self, hidden: set[str] = set()) -> list[dict[str, Any]]:  # noqa: B006
        """Return the functions in the form of chat templates."""
        documents = [each for name, (_, each) in self._documents.items() if name not in hidden]
        keys = ("name", "description", "parameters")
        return [{"type": "function", "function": {key: _json_types(each[key]) for key in keys}} for each in documents]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a function, or its error, in the package's words."""
        if name not in self._documents:
            return f"Error during execution: name {name!r} is not defined"
        try:
            for key, value in arguments.items():
                if isinstance(value, int | float) and abs(value) > _MOST.get(key, _MOST_OF_OTHERS):
                    raise ValueError(f"{key} is too large")
            value = getattr(self.instances[self._documents[name][0]], name)(**arguments)
        except Exception as error:  # noqa: BLE001 - a call of the model's may raise anything, and is told what
            return f"Error during execution: {error}"
        if isinstance(value, dict):
            try:
                return json.dumps(value)
            except (TypeError, ValueError):
                return str(value)
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


def _json_types(value: Any) -> Any:
    """Return a schema of the package with JSON schema's names of types."""
    if isinstance(value, list):
        return [_json_types(each) for each in value]
    if not isinstance(value, dict):
        return value
    changed = {key: _json_types(each) for key, each in value.items()}
    return changed | ({"type": _TYPES[changed["type"]]} if changed.get("type") in _TYPES else {})


def _folder() -> Path:
    spec = find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise ConfigError("the package bfcl-eval is missing. Install it alone: pip install --no-deps bfcl-eval")
    return Path(spec.origin).parent / "data"


def _read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (_folder() / name).read_text(encoding="utf-8").splitlines()]


@cache
def _tasks() -> dict[str, dict[str, Any]]:
    """Return all tasks by id, with their own calls."""
    files = [f"BFCL_v4_multi_turn_{category}.json" for category in CATEGORIES]
    found = {task["id"]: task for file in files for task in _read(file)}
    for file in files:
        for answer in _read(f"possible_answer/{file}"):
            found[answer["id"]]["ground_truth"] = answer["ground_truth"]
    return found
