"""The driver's handle to all learners, whose calls wait for the slowest learner; checkpoints and exports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from hpc_grpo.config import Config
from hpc_grpo.driver.batches import Batch, balanced
from hpc_grpo.driver.remote import ended, get_all
from hpc_grpo.driver.rollouts import DriverState
from hpc_grpo.driver.schedule import Durations, Schedule, TrainLength
from hpc_grpo.errors import ConfigError, HpcGrpoError
from hpc_grpo.learner.actor import WATCHING, WRITING
from hpc_grpo.learner.rendezvous import Rendezvous
from hpc_grpo.metrics.reductions import merge
from hpc_grpo.run.checkpoint import Checkpoint, find_checkpoint, prune_checkpoints, set_aside, valid_checkpoints
from hpc_grpo.run.files import recover_dirs, restore_dirs, wait_for_space
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.retention import prune_exports
from hpc_grpo.types import Minibatch, RemoteGroup, TrainSequence

_ASKED_EVERY_S = 5.0
_MIN_COPIES_OF_WEIGHTS = 3
"""A checkpoint is at least this many times as large as an export: it holds weights and AdamW's two moments."""


class LearnerGroup:
    """All learners of the run, by rank. Each group of `sequence_parallel` neighbours gets the same share of a batch."""

    def __init__(self, learners: Sequence[Any], sequence_parallel: int = 1) -> None:
        self._learners, self._sequence_parallel = learners, sequence_parallel
        self.on_progress: Callable[[int, int], None] = lambda _trained, _total: None
        """Called every few seconds of a step with the first learner's numbers of trained and of all microbatches."""
        self._rendezvous: Any = None  # Keep the reference: Ray ends an actor without references.

    def start(self) -> None:
        """Let the learners form their group, load the model and build their optimizers. Waits for all learners."""
        if len(self._learners) > 1:
            self._rendezvous = ray.remote(Rendezvous).options(num_cpus=0).remote()
        self._on_all("start", self._rendezvous, waiting_for="the learners")

    def train(self, batch: Batch, record: Path | None = None) -> dict[str, float]:
        """Take one optimizer step for each minibatch. Return the metrics of all learners together.

        Saves the batch in the folder `record`, if given. The split over learners balances cost and does not change the
        gradient: the loss is divided by the count of tokens, or sequences, of all learners.
        """
        degree, measured = self._sequence_parallel, batch.measured
        num = len(self._learners) // degree
        shares: list[list[Minibatch[RemoteGroup | TrainSequence]]] = [[] for _ in range(num)]
        for minibatch in batch.minibatches:
            num_tokens = sum(item.num_trained_tokens for item in minibatch)
            num_sequences = sum(item.num_sequences for item in minibatch)
            split = balanced(minibatch, [item.cost for item in minibatch], num)
            for share, part in zip(shares, split, strict=True):
                share.append(Minibatch(tuple(item.data for item in part), num_tokens, num_sequences))
        calls = [
            learner.train.remote(shares[rank // degree], record, measured[rank // degree :: num] if measured else None)
            for rank, learner in enumerate(self._learners)
        ]
        self._note_progress(calls)
        return merge(get_all(calls, None, "the training step")[::degree])

    def _note_progress(self, calls: Sequence[Any]) -> None:
        """Call `on_progress` every few seconds until the first call has ended."""
        asked: Any = None
        while not ended(calls, _ASKED_EVERY_S):
            if asked is not None and ended([asked], 0.0):
                self.on_progress(*get_all([asked], None, "the training step")[0])
                asked = None
            asked = asked or self._learners[0].microbatches.options(concurrency_group=WATCHING).remote()

    def begin_checkpoint(self, path: Path, driver_state: dict[str, Any], *, behind: bool) -> Any:
        """Stage a checkpoint and start writing it. Return a handle for `seconds_of`.

        With `behind`, the state is copied to host memory, so training may continue during the write.
        """
        self._on_all("stage_checkpoint", path, driver_state, behind, waiting_for="the checkpoint")
        shares = [learner.write_checkpoint.options(concurrency_group=WRITING).remote() for learner in self._learners]
        return self._learners[0].publish_checkpoint.options(concurrency_group=WRITING).remote(*shares)

    def seconds_of(self, writing: Any, *, waits: bool) -> float | None:
        """Return the seconds that a checkpoint took, None if it is not published yet. With `waits`, wait for it.

        Raises the error of the write.
        """
        if not waits and not ray.wait([writing], timeout=0)[0]:
            return None
        return float(get_all([writing], None, "the checkpoint")[0])

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint. If another number of learners wrote it, convert it to the universal form for the load.

        Raises LaunchError without the space to rewrite the checkpoint, and ConfigError if it cannot be loaded.
        """
        is_resharded = checkpoint.manifest.world_size != len(self._learners)
        if is_resharded:
            print(f"Rewriting {checkpoint.path.name} for {len(self._learners)} learners.", flush=True)
            get_all([self._learners[0].write_universal.remote(checkpoint.path)], None, "rewriting the checkpoint")
        self._on_all("load_checkpoint", checkpoint.path, waiting_for="loading the checkpoint")
        if is_resharded:
            recover_dirs(checkpoint.path.parent)

    def export(self, path: Path) -> None:
        self._on_all("export", path, waiting_for="the export")

    def _on_all(self, method: str, *args: Any, waiting_for: str) -> None:
        get_all([getattr(learner, method).remote(*args) for learner in self._learners], None, waiting_for)


class Checkpoints:
    """Writes, prunes and finds the run's checkpoints and exports; all learners write a checkpoint together."""

    def __init__(
        self, config: Config, run_dir: RunDir, learners: LearnerGroup, durations: Durations, length: TrainLength
    ) -> None:
        self._config = config.checkpoint
        self._saves = Schedule(config.checkpoint.every, length)
        self._exports = Schedule(config.checkpoint.export_every, length)
        self._run_dir, self._learners, self._durations = run_dir, learners, durations
        self._writing: Any = None
        self._saved_step = self._exported_step = -1

    def resume(self) -> DriverState:
        """Load the newest valid checkpoint and return its state, or the initial state if the run has never saved.

        Renames newer damaged checkpoints, and removes unfinished ones. Writes an export that the last attempt did not
        finish. Raises ConfigError if the run has saved, but no checkpoint is valid.
        """
        restore_dirs(self._run_dir.checkpoints)
        found, damaged = find_checkpoint(self._run_dir)
        for parent in (self._run_dir.checkpoints, self._run_dir.exports):
            recover_dirs(parent)
        for checkpoint in damaged:
            print(f"Damaged, and kept as {set_aside(checkpoint).name}: checkpoint {checkpoint}.", flush=True)
        if found is None:
            return DriverState()
        driver_state = found.manifest.driver_state
        try:
            state = DriverState(**driver_state)
        except TypeError as error:
            raise ConfigError(
                f"{found.path}: its driver_state is {driver_state}, of another version of hpc-grpo "
                f"({error}). Resume with the version that wrote it (source.json names it)."
            ) from error
        self._learners.load_checkpoint(found)
        self._saved_step = state.step
        if self._exports.is_due(state.step) and not self._run_dir.export(state.step).exists():
            self.export(state)
        return state

    def save_if_due(self, state: DriverState) -> None:
        """Save and export as often as `checkpoint` says. Also save after a run's first step, to measure a save's time.

        Also save before an export, which may take longer than the time that is kept before the end of the allocation.
        With `checkpoint.behind_training`, training continues while the checkpoint is written. An error of this write
        is raised here, one or more steps later.
        """
        self._take_written(waits=False)
        is_measured = self._durations.p95_s is not None or self.is_writing
        exports = self._exports.is_due(state.step)
        if exports or not is_measured or self._saves.is_due(state.step):
            self._begin(state, behind=self._config.behind_training and not exports)
        if exports:
            self.export(state)

    def save(self, state: DriverState) -> None:
        """Write a checkpoint of `state` unless it exists, and wait until it is on the disk."""
        if state.step != self._saved_step:
            self._begin(state, behind=False)
        self._take_written(waits=True)

    @property
    def is_writing(self) -> bool:
        """Return whether a checkpoint was still being written at the last check."""
        return self._writing is not None

    def close(self) -> None:
        """Wait for the pending checkpoint after the run failed. Print an error of the write instead of raising it."""
        try:
            self._take_written(waits=True)
        except (HpcGrpoError, RayError) as error:
            print(f"The last checkpoint was not finished: {error}", flush=True)

    def export(self, state: DriverState) -> None:
        """Write the model, unless this process just wrote it, and prune old exports.

        Overwrites an export of an earlier process: its step may have been lost in a crash and trained again.
        """
        if state.step != self._exported_step:
            wait_for_space(self._run_dir.path, self._num_bytes() // _MIN_COPIES_OF_WEIGHTS, "An export")
            self._learners.export(self._run_dir.export(state.step))
            self._exported_step = state.step
            self._exports.start_over()
            prune_exports(self._run_dir, state.step, self._config.keep_exports)

    def _begin(self, state: DriverState, *, behind: bool) -> None:
        """Stage a checkpoint once the previous one is on the disk, and start writing it."""
        self._take_written(waits=True)
        wait_for_space(self._run_dir.path, self._num_bytes(), "A checkpoint")
        path = self._run_dir.checkpoint(state.step)
        self._writing = self._learners.begin_checkpoint(path, asdict(state), behind=behind)
        self._saved_step = state.step
        self._saves.start_over()
        if not behind:
            self._take_written(waits=True)

    def _take_written(self, *, waits: bool) -> None:
        """If the pending checkpoint is on the disk, record its duration and prune old checkpoints."""
        if self._writing is None:
            return
        writing, saved_step = self._writing, self._saved_step
        self._writing, self._saved_step = None, -1  # in case the write has failed
        seconds = self._learners.seconds_of(writing, waits=waits)
        self._saved_step = saved_step
        if seconds is None:
            self._writing = writing
            return
        self._durations.add(seconds)
        prune_checkpoints(self._run_dir, self._config.keep_last)

    def _num_bytes(self) -> int:
        """Return the bytes of the newest checkpoint, or 0 before the first."""
        newest = next(valid_checkpoints(self._run_dir, check_hashes=False), None)
        return sum(entry.size for entry in newest.manifest.files) if newest else 0


def refuse_without_checkpoint(run_dir: RunDir) -> None:
    """Raise ConfigError, before any actor starts, if the run has saved and no checkpoint is valid by file sizes."""
    restore_dirs(run_dir.checkpoints)
    find_checkpoint(run_dir, check_hashes=False)
