"""The run directory, the only state of a run. All its paths are defined here."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.files import copy_path, writing
from hpc_grpo.run.owner import PRIVATE_DIR_MODE, refuse_shared

if TYPE_CHECKING:
    from hpc_grpo.config import Config

CELLS = ".cells"
"""Folder in a sweep with a symlink to the run of each task (cli/sweep.py)."""


class _Inside:
    """A descriptor: an attribute of `RunDir` that is a path in the run directory."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, run: RunDir, _owner: type[RunDir]) -> Path:
        return run.path.joinpath(*self._parts)


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. docs/run-directory.md has a table of who writes each file and what it means."""

    path: Path

    config = _Inside("config.yaml")
    source = _Inside("source.json")
    source_dir = _Inside("source")  # run/source.py
    inputs = _Inside("inputs.json")  # run/frozen_config.py
    state = _Inside("state.json")
    metrics = _Inside("metrics.jsonl")
    ledger = _Inside("ledger.jsonl")  # run/ledger.py
    tensorboard = _Inside("tensorboard")
    wandb_id = _Inside("wandb_run_id")
    secret = _Inside(".secret", "ray_token")  # mode 0600
    join_token = _Inside(".secret", "join_token")  # mode 0600: launch/place/joined
    checkpoints = _Inside("checkpoints")
    exports = _Inside("export")
    evals = _Inside("evals")  # evals of `hpc-grpo model eval`, one folder each: run/evals.py
    stop_marker = _Inside("STOP")
    complete_marker = _Inside("COMPLETE")
    holder = _Inside("holder.json")  # the attempt that trains the run, and its last sign of life: run/lock.py
    chain = _Inside("chain.json")  # run/chain.py
    attempts = _Inside("attempts")
    members = _Inside("members")  # processes of `pod` and `host`: launch/place/joined/place.py
    slurm_logs = _Inside("slurm")  # outputs of submitted jobs

    @property
    def is_cell(self) -> bool:
        """Return whether the run belongs to a sweep: its folder is in the sweep's folder."""
        return is_sweep(self.path.parent)

    @property
    def name(self) -> str:
        """The run's name: the name of its folder; in a sweep, SWEEP/RUN."""
        return f"{self.path.parent.name}/{self.path.name}" if self.is_cell else self.path.name

    @property
    def shared_root(self) -> Path:
        """The folder of all runs. It also holds shared data: tokenized data and compiled kernels."""
        return self.path.parent.parent if self.is_cell else self.path.parent

    def slurm_log(self, job_id: str) -> Path:
        """Return the output file of a job that hpc-grpo submitted."""
        return self.slurm_logs / f"{job_id}_0_log.out"

    def job_mark(self, job_id: str) -> Path:
        """Return the file that the start of a job's script creates, before anything can fail."""
        return self.slurm_logs / f"{job_id}.began"

    def rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step}.jsonl"

    def eval_rollouts(self, step: int, eval_set: str = "") -> Path:
        """Return the graded completions of an eval. Those of a named set are in a folder of that name."""
        return self.path / "rollouts" / eval_set / f"eval_step_{step}.jsonl"

    def profiles(self, first: int, last: int) -> Path:
        return self.path / "profiles" / f"steps_{first}_{last}"

    def batches(self, step: int) -> Path:
        return self.path / "batches" / f"step_{step}"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def export(self, step: int) -> Path:
        return self.exports / f"step_{step}"

    def attempt(self, number: int, job_id: str) -> Path:
        return self.attempts / f"{number}-{job_id}"

    def next_attempt_number(self) -> int:
        return max(self.attempt_dirs(), default=0) + 1

    def attempt_dirs(self) -> dict[int, Path]:
        """Return the folders of the attempts by number, in order."""
        return dict(sorted((int(path.name.split("-")[0]), path) for path in self.attempts.glob("[0-9]*-*")))

    def has_config(self) -> bool:
        """Return whether the folder is a run's, by its config or the copy of it."""
        return self.config.is_file() or copy_path(self.config).is_file()

    def is_complete(self) -> bool:
        return self.complete_marker.exists()

    def latest_export(self) -> Path | None:
        steps = step_dirs(self.exports)
        return steps[max(steps)] if steps else None

    def create(self) -> None:
        """Create the directory, for this user alone. Raises ConfigError if others may write it, or this user cannot."""
        refuse_shared(self.path)
        with writing(self.path, "Set run.root to a folder you can write to."):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=PRIVATE_DIR_MODE, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()

    def refuse_unwritable_root(self) -> None:
        """Raise ConfigError if the directory can neither be created nor written."""
        with writing(self.path, "Set run.root to a folder you can write to."):
            there = next(each for each in (self.path, *self.path.parents) if os.path.lexists(each))
            tempfile.TemporaryFile(dir=there).close()

    def refuse_read_only(self) -> None:
        """Raise ConfigError if this user cannot write to the directory, which exists."""
        if not os.access(self.path, os.W_OK):  # also on a full disk, which `disk clean` frees
            raise ConfigError(
                f"{self.path} cannot be written, and this command writes there. Copy the run to a folder of yours."
            )


def is_sweep(folder: Path) -> bool:
    """Return whether a folder holds the runs of a sweep."""
    return (folder / CELLS).is_dir()


def tokenized_data(config: Config) -> Path:
    """Return the folder of tokenized data: data.cache_dir, by default one that runs share."""
    return Path(config.data.cache_dir) if config.data.cache_dir else RunDir(config.run_path).shared_root / ".data"


def step_dirs(parent: Path, named: str = r"step_(\d+)") -> dict[int, Path]:
    """Return the `step_N` folders below `parent`, by N; or the files and folders with another `named` pattern."""
    found = ((re.fullmatch(named, path.name), path) for path in parent.glob(f"{named.partition('(')[0]}*"))
    return {int(match[1]): path for match, path in found if match}
