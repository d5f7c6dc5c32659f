"""An eval apart from training: the folder in which `hpc-grpo eval` and `sample` tell their driver what to do.

It is laid out as a run's, with the config, and has these files besides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.run.owner import PRIVATE_DIR_MODE
from hpc_grpo.run.paths import RunDir


@dataclass(frozen=True)
class EvalRequest:
    """`models` are the folders or names of what is evaluated, by what they are called.

    Where there are `prompts`, completions of them are wanted, and no metrics.
    """

    models: Mapping[str, str]
    prompts: Sequence[str] = ()

    def save(self, folder: RunDir) -> None:
        write_json_atomic(_request(folder), asdict(self))


def read_request(folder: RunDir) -> EvalRequest:
    """Read what is asked for. Raises ConfigError where it is not there, or damaged."""
    try:
        return EvalRequest(**json.loads(_request(folder).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{_request(folder)} does not say what to evaluate ({error}): run hpc-grpo eval.") from error


def new_eval_dir(parent: Path) -> RunDir:
    """Make the folder of the next eval below `parent`. Raises ConfigError when it cannot be written."""
    number = max((int(path.name) for path in parent.glob("*") if path.name.isdigit()), default=0) + 1
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            folder = RunDir(parent.absolute() / str(number))
            try:
                folder.path.mkdir(mode=PRIVATE_DIR_MODE)
            except FileExistsError:
                number += 1  # another eval that began at the same time
            else:
                return folder
    except OSError as error:
        raise ConfigError(
            f"{parent} cannot be written ({error.strerror}). Work in another folder: --folder FOLDER."
        ) from error


def result_file(folder: RunDir) -> Path:
    return folder.path / "result.json"


def answer_file(folder: RunDir) -> Path:
    """Return the file of what the command prints: a table, or what the models say."""
    return folder.path / "answer.txt"


def completions_file(folder: RunDir, model: str, eval_set: str) -> Path:
    """Return the graded completions of a model; of the set "" those of `data.eval` or `data.held_out`."""
    name = f"eval_{eval_set}.jsonl" if eval_set else "eval.jsonl"
    return folder.path / "completions" / model.replace("/", "_") / name


def _request(folder: RunDir) -> Path:
    return folder.path / "request.json"
