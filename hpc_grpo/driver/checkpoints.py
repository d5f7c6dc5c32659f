"""The driver's side of checkpoints and exports: when one is due, what it holds of the driver, where a run resumes.

All learners write a checkpoint together.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ray.exceptions import RayError

from hpc_grpo.config import Config
from hpc_grpo.driver.learners import LearnerGroup
from hpc_grpo.driver.length import Durations, TrainLength
from hpc_grpo.driver.rollouts import DriverState
from hpc_grpo.driver.schedule import Schedule
from hpc_grpo.errors import ConfigError, HpcGrpoError
from hpc_grpo.run.checkpoint import Checkpoint, find_checkpoint, prune_checkpoints, set_aside, valid_checkpoints
from hpc_grpo.run.files import recover_dirs, restore_dirs, wait_for_space
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.retention import prune_exports

_MIN_COPIES_OF_WEIGHTS = 3
"""In a checkpoint: AdamW's two moments lie beside the weights."""


class Checkpoints:
    """Writes, prunes and finds the run's checkpoints and exports."""

    def __init__(
        self, config: Config, run_dir: RunDir, learners: LearnerGroup, durations: Durations, length: TrainLength
    ) -> None:
        self._config = config.checkpoint
        self._saves = Schedule(config.checkpoint.every, length)
        self._exports = Schedule(config.checkpoint.export_every, length)
        self._run_dir = run_dir
        self._learners = learners
        self._durations = durations
        self._writing: Any = None
        self._saved_step = -1
        self._exported_step = -1

    def resume(self) -> DriverState:
        """Load the newest valid checkpoint and return its state, or a fresh one for a run that never saved.

        Damaged ones that are newer are set aside. Raises ConfigError where the run has saved and none is whole.
        """
        restore_dirs(self._run_dir.checkpoints)
        found, damaged = find_checkpoint(self._run_dir)
        for parent in (self._run_dir.checkpoints, self._run_dir.exports):
            recover_dirs(parent)
        for checkpoint in damaged:
            print(f"Damaged, and kept as {set_aside(checkpoint).name}: checkpoint {checkpoint}.", flush=True)
        if found is None:
            return DriverState()
        state = _driver_state(found)
        self._learners.load_checkpoint(found)
        self._saved_step = state.step
        return state

    def save_if_due(self, state: DriverState) -> None:
        """Save as often as `checkpoint` says, and after a run's first step, to know how long a save takes.

        It is written while training goes on; an error of that is raised here, one or more steps later.
        """
        self._take_written(waits=False)
        is_measured = self._durations.p95_s is not None or self.is_writing
        if not is_measured or self._saves.is_due(state.step):
            self._begin(state, behind=self._config.behind_training)
        if self._exports.is_due(state.step):
            self.export(state)

    def save(self, state: DriverState) -> None:
        """Write a checkpoint of `state` unless there is one, and wait until it is on the disk."""
        if state.step != self._saved_step:
            self._begin(state, behind=False)
        self._take_written(waits=True)

    @property
    def is_writing(self) -> bool:
        """Tell whether a checkpoint was on its way to the disk when it was last looked at."""
        return self._writing is not None

    def close(self) -> None:
        """Wait for the checkpoint on its way to the disk, after the run failed. It is whole, if it gets there."""
        try:
            self._take_written(waits=True)
        except (HpcGrpoError, RayError) as error:
            print(f"The last checkpoint was not finished: {error}", flush=True)

    def _begin(self, state: DriverState, *, behind: bool) -> None:
        """Stage a checkpoint once the one before is on the disk, and have it written."""
        self._take_written(waits=True)
        wait_for_space(self._run_dir.path, self._num_bytes(), "A checkpoint")
        path = self._run_dir.checkpoint(state.step)
        self._writing = self._learners.begin_checkpoint(path, asdict(state), behind=behind)
        self._saved_step = state.step
        self._saves.start_over()
        if not behind:
            self._take_written(waits=True)

    def _take_written(self, *, waits: bool) -> None:
        """Note that the checkpoint on its way to the disk is there, once it is, and remove what it makes too many."""
        if self._writing is None:
            return
        writing, saved_step = self._writing, self._saved_step
        self._writing, self._saved_step = None, -1  # unless it turns out well
        seconds = self._learners.seconds_of(writing, waits=waits)
        self._saved_step = saved_step
        if seconds is None:
            self._writing = writing
            return
        self._durations.add(seconds)
        prune_checkpoints(self._run_dir, self._config.keep_last)

    def export(self, state: DriverState) -> None:
        """Write the model unless this process just did: an export already there may be of steps that a crash undid."""
        if state.step != self._exported_step:
            wait_for_space(self._run_dir.path, self._num_bytes() // _MIN_COPIES_OF_WEIGHTS, "An export")
            self._learners.export(self._run_dir.export(state.step))
            self._exported_step = state.step
            self._exports.start_over()
            prune_exports(self._run_dir, state.step, self._config.keep_exports)

    def _num_bytes(self) -> int:
        """Return the size of the newest checkpoint, or 0 before the first."""
        newest = next(valid_checkpoints(self._run_dir, check_hashes=False), None)
        return sum(entry.size for entry in newest.manifest.files) if newest else 0


def refuse_without_checkpoint(run_dir: RunDir) -> None:
    """Raise ConfigError where `Checkpoints.resume` would, as far as file sizes tell: before anything is started."""
    restore_dirs(run_dir.checkpoints)
    find_checkpoint(run_dir, check_hashes=False)


def _driver_state(checkpoint: Checkpoint) -> DriverState:
    try:
        return DriverState(**checkpoint.driver_state)
    except TypeError as error:
        raise ConfigError(
            f"{checkpoint.path}: its driver_state is {checkpoint.driver_state}, of another version of hpc-grpo "
            f"({error}). Resume with the version that wrote it (source.json names it)."
        ) from error
