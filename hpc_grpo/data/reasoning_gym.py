"""Data source `reasoning_gym:TASK`: items made by the package reasoning-gym; `args` are the task's arguments.

A process with a fixed hash seed makes the items: some tasks iterate over sets, so another seed would give other items.
A row's `metadata` is text, because scorers distinguish tuples from lists and JSON does not. The reward `reasoning_gym`
parses it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from importlib import metadata
from typing import Any

from hpc_grpo.config import SourceConfig
from hpc_grpo.data.sources import Item, Source
from hpc_grpo.errors import ConfigError, nearest
from hpc_grpo.registry import SOURCES

_PROGRAM = "import sys; from hpc_grpo.data.reasoning_gym import main; main(*sys.argv[1:])"


@SOURCES.register("reasoning_gym")
class ReasoningGym(Source):
    def __init__(self, config: SourceConfig) -> None:
        super().__init__(config)
        self._task = config.path.partition(":")[2]

    def items(self) -> Iterator[Item]:
        command = [sys.executable, "-c", _PROGRAM, self._task, json.dumps(self.config.args)]
        environ = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with tempfile.TemporaryFile("w+") as errors:  # not a pipe, which warnings would fill
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ) as made:
                assert made.stdout is not None
                try:
                    yield from map(json.loads, made.stdout)
                    made.wait()
                finally:
                    made.kill()  # the caller did not read all items
            if made.returncode:
                errors.seek(0)
                told = (errors.read().strip().splitlines() or [f"exit code {made.returncode}"])[-1]
                raise ConfigError(f"{self.config.path} with args = {self.config.args} makes no items: {told}")

    def identity(self) -> Mapping[str, str]:
        try:
            version = metadata.version("reasoning-gym")
        except metadata.PackageNotFoundError as error:
            raise ConfigError(
                f"{self.config.path} needs the package reasoning-gym: install hpc-grpo[tasks]."
            ) from error
        return {"reasoning-gym": version, "task": self._task, "args": json.dumps(self.config.args, sort_keys=True)}


def main(task: str, args: str) -> None:
    """Print the items of a task, one JSON object a line. On failure the last line of stderr gives the reason."""
    out = sys.stdout
    with redirect_stdout(sys.stderr):  # a task may print while it makes items
        try:
            items = make_task(task, args)
        except ValueError as error:
            sys.exit(str(error))
        for item in items:
            made = {"question": item["question"], "answer": item["answer"] or "", "task": task, "task_args": args}
            print(json.dumps({**made, "metadata": json.dumps(_encoded(item["metadata"]))}), file=out)


def make_task(task: str, args: str) -> Any:
    """Return a task of the package with `args`, given as JSON. Its items depend on its seed, 0 by default.

    Raises ValueError if the task does not exist or does not take the arguments.
    """
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        raise ValueError(f"There is no task {task!r}{nearest(task, DATASETS)} Tasks: {', '.join(sorted(DATASETS))}.")
    try:
        return create_dataset(task, **{"seed": 0, **json.loads(args)})
    except (TypeError, AssertionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def read_metadata(text: str) -> Any:
    """Parse the metadata of an item into the task's Python values.

    >>> read_metadata(json.dumps(_encoded({"grid": ((1, 2), [3]), "of": {4: "x"}})))
    {'grid': ((1, 2), [3]), 'of': {4: 'x'}}
    """
    return json.loads(text, object_hook=_decoded)


def _encoded(value: Any) -> Any:
    """Convert a value to JSON. A tuple, and a dict with keys other than strings, becomes an object with a mark."""
    if isinstance(value, tuple):
        return {"__tuple__": [_encoded(part) for part in value]}
    if isinstance(value, list):
        return [_encoded(part) for part in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _encoded(part) for key, part in value.items()}
        return {"__dict__": [[_encoded(key), _encoded(part)] for key, part in value.items()]}
    return value


def _decoded(value: dict[str, Any]) -> Any:
    if value.keys() == {"__tuple__"}:
        return tuple(value["__tuple__"])
    if value.keys() == {"__dict__"}:
        return dict(value["__dict__"])
    return value
