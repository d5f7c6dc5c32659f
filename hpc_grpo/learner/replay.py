"""Takes a checkpoint up on one learner in this process, without Ray: to train recorded steps again, or to export it.

Consumes a run's checkpoint and the records of the steps after it; produces the metrics of the last of them, and leaves
the run as it is; or the checkpoint's model in Hugging Face format.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.checkpoint import load_checkpoint, write_universal
from hpc_grpo.learner.export import export_model
from hpc_grpo.learner.learner import Learner
from hpc_grpo.learner.record import read_batches
from hpc_grpo.metrics.reductions import merge
from hpc_grpo.run.checkpoint import Checkpoint, valid_checkpoints
from hpc_grpo.run.paths import RunDir, step_dirs
from hpc_grpo.run.progress import read_metrics, read_state


@dataclass(frozen=True)
class Replay:
    """The learners' metrics of a step, by name: those of the run, and those of this process.

    `num_learners` shared the step then. `first_step` is where the replay began: after it comes the first step trained.
    """

    recorded: Mapping[str, float]
    replayed: Mapping[str, float]
    num_learners: int
    first_step: int

    @property
    def differences(self) -> dict[str, float]:
        """Return replayed minus recorded of the metrics that both have, where they are not equal to the last bit."""
        shared = (name for name in self.replayed if name in self.recorded)
        pairs = {name: self.replayed[name] - self.recorded[name] for name in shared}
        return {name: difference for name, difference in pairs.items() if difference != 0.0}


def replay(run: RunDir, step: int, config: Config, changed: Config) -> Replay:
    """Train `step` again: by `changed`, from the weights that the steps before it gave by `config`.

    Raises ConfigError where the run has no record of it, or of a step between it and the checkpoint before it.
    """
    start = _start(run, step)
    first_step = start.step if start else 0
    records = {number: read_batches(_record(run, number)) for number in range(first_step + 1, step + 1)}
    recorded = read_metrics(run.metrics).get(step)
    if recorded is None:
        raise ConfigError(f"{run.metrics} has no line of step {step}: there is nothing to compare with.")
    state = read_state(run)
    total_steps = state.total_steps if state else step
    learner = Learner(changed, total_optimizer_steps=config.optimizer_steps(total_steps))
    if start is not None:
        load_here(learner, start)
    learner.train_by(config)
    for number in range(first_step + 1, step):
        learner.train_step(records[number][0])
    learner.train_by(changed)
    minibatches, num_learners = records[step]
    replayed = merge([learner.train_step(minibatches)])
    return Replay({name: recorded[name] for name in replayed if name in recorded}, replayed, num_learners, first_step)


def export_checkpoint(run: RunDir, step: int | None, config: Config) -> Path:
    """Write the export of a checkpoint, by default of the newest. Raises ConfigError where there is none of `step`."""
    whole = {each.step: each for each in valid_checkpoints(run, check_hashes=False)}
    if not whole or (step is not None and step not in whole):
        there = ", ".join(map(str, sorted(whole))) or "none"
        asked = "" if step is None else f"--step = {step}: "
        raise ConfigError(f"{asked}run {run.path.name} has whole checkpoints of these steps: {there}.")
    checkpoint = whole[max(whole) if step is None else step]
    learner = Learner(config, total_optimizer_steps=1)
    load_here(learner, checkpoint)
    export_model(learner, run.export(checkpoint.step))
    return run.export(checkpoint.step)


def _start(run: RunDir, step: int) -> Checkpoint | None:
    """Return the newest whole checkpoint from before `step`; None where the run began with none."""
    return next((each for each in valid_checkpoints(run, check_hashes=False) if each.step < step), None)


def _record(run: RunDir, step: int) -> Path:
    folder = run.batches(step)
    if not folder.is_dir():
        there = ", ".join(map(str, sorted(step_dirs(folder.parent)))) or "none"
        raise ConfigError(
            f"The batch of step {step} of run {run.path.name} was not kept. Steps with a batch: {there}. A replay "
            f"needs that of its step, and of each one since the checkpoint before it: set checkpoint.keep_batches."
        )
    return folder


def load_here(learner: Learner, checkpoint: Checkpoint) -> None:
    """Load a checkpoint of any number of learners; what is written for that goes into a temporary folder."""
    if checkpoint.manifest.world_size == 1:
        load_checkpoint(learner, checkpoint.path)
        return
    with tempfile.TemporaryDirectory(prefix="hpc-grpo-") as folder:
        write_universal(checkpoint.path, Path(folder))
        load_checkpoint(learner, checkpoint.path, Path(folder))
