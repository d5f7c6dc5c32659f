"""Whether the files and folders that a config names are where its job will look for them, and begin as it expects."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.config import Config, LaunchConfig
from hpc_grpo.data.sources import completion_text, load_items
from hpc_grpo.errors import ConfigError
from hpc_grpo.preflight.prefetch.items import Item, dataset_of, is_there, items_of


@dataclass(frozen=True)
class MissingInput:
    """A path that is not there: the config's `key` with its value, and the `place` that was looked at."""

    key: str
    name: str
    place: Path

    def __str__(self) -> str:
        hint = " (~ is not expanded here: write the folder out)" if self.name.startswith("~") else ""
        return f"{self.key} = {self.name}: there is no {self.place}{hint}"


def refuse_missing_inputs(config: Config, working_dir: Path) -> None:
    """Raise ConfigError for what `missing_inputs` finds: the job would queue for hours to say the same."""
    if missing := list(missing_inputs(config, working_dir)):
        listed = "\n".join(f"  {one}" for one in missing)
        raise ConfigError(
            f"The job would not find what its config names:\n{listed}\n"
            f"Give paths that exist; relative ones are relative to {working_dir}."
        )


def refuse_missing_python(launch: LaunchConfig) -> None:
    """Raise ConfigError where the job's shell could not start `launch.python`: the job would queue, then end at once
    and without a successor."""
    if launch.python is not None and shutil.which(launch.python) is None:
        raise ConfigError(
            f"launch.python = {launch.python}: must be a file that can be executed, and here it is none. "
            f"Give the Python of an installation on a file system that this machine and the nodes see."
        )


def refuse_missing_notify(launch: LaunchConfig, working_dir: Path) -> None:
    """Raise ConfigError where `launch.notify` names a file that is no program: it would be missed when it matters.

    Not judged: a name without a folder, which the nodes may have and this machine not; `~`, which may be theirs.
    """
    program = launch.notify[0] if launch.notify else ""
    if "/" in program and not program.startswith("~") and shutil.which(working_dir / program) is None:
        raise ConfigError(
            f"launch.notify = {launch.notify}: {working_dir / program} must be a file that can be executed, and it is "
            f"none. Give a program on a file system that the nodes see, or a name that is on their PATH."
        )


def refuse_unreadable_data(config: Config, working_dir: Path) -> None:
    """Raise ConfigError, in the job's words, where a .jsonl file that is there does not begin with a row that has the
    configured fields. The first row alone is read: the rest is the job's to check."""
    for item in _items(config, working_dir):
        place = working_dir / item.name
        if place.suffix == ".jsonl" and is_there(place):
            dataset = dataset_of(config, item).model_copy(update={"path": str(place), "max_items": 1})
            [row] = load_items(dataset)
            if config.needs.labels and item.key == "data.train.path":
                completion_text(config, row, 0)


def missing_inputs(config: Config, working_dir: Path) -> Iterator[MissingInput]:
    """The paths that the run would read and that do not exist; relative ones are relative to `working_dir`.

    Not judged: names of the Hugging Face hub, and paths with a `$`, whose variable may be one of the job's.
    """
    for key, name, path in _local_paths(config, working_dir):
        place = working_dir / path
        if "$" not in name and not is_there(place):
            yield MissingInput(key, name, place)


def _local_paths(config: Config, working_dir: Path) -> Iterator[tuple[str, str, str]]:
    """Key and value in the config, and the path that must exist."""
    for item in _items(config, working_dir):
        if item.is_local:
            yield item.key, item.name, f"{item.name}/config.json" if item.key == "model.path" else item.name
    for position, reward in enumerate(config.rewards if config.needs.rollouts else []):
        file, _, _ = reward.name.rpartition(":")
        if file.endswith(".py"):
            yield f"rewards.{position}.name", reward.name, file


def _items(config: Config, working_dir: Path) -> Iterator[Item]:
    """Model and data that the run would read: without eval nobody reads its data."""
    for item in items_of(config, working_dir):
        if item.key != "data.eval.path" or config.eval.every_steps is not None:
            yield item
