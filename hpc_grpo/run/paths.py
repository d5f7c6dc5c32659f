"""The run directory, the only state of a run: every path of it is made here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.errors import ConfigError

_STEP_DIR = re.compile(r"step_(\d+)$")


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. See the table in docs/run-directory.md for who writes each and what it means."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def source(self) -> Path:
        return self.path / "source.json"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        """The ordinals that each step trained on; append-only, see run/ledger.py."""
        return self.path / "ledger.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def wandb_id(self) -> Path:
        return self.path / "wandb_run_id"

    @property
    def secret(self) -> Path:
        """Ray's token, mode 0600."""
        return self.path / ".secret" / "ray_token"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def exports(self) -> Path:
        return self.path / "export"

    @property
    def stop_marker(self) -> Path:
        return self.path / "STOP"

    @property
    def complete_marker(self) -> Path:
        return self.path / "COMPLETE"

    @property
    def holder(self) -> Path:
        """The attempt that is training the run, and its last sign of life; see run/lock.py."""
        return self.path / "holder.json"

    @property
    def chain(self) -> Path:
        """The run's jobs; see run/chain.py."""
        return self.path / "chain.json"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def slurm_logs(self) -> Path:
        """Job scripts and outputs of submitted jobs."""
        return self.path / "slurm"

    def slurm_log(self, job_id: str) -> Path:
        """The output of a job that `hpc-grpo` submitted."""
        return self.slurm_logs / f"{job_id}_0_log.out"

    def rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step}.jsonl"

    def eval_rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"eval_step_{step}.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def export(self, step: int) -> Path:
        return self.exports / f"step_{step}"

    def attempt(self, number: int, job_id: str) -> Path:
        return self.attempts / f"{number}-{job_id}"

    def next_attempt_number(self) -> int:
        numbers = [int(p.name.split("-")[0]) for p in self.attempts.glob("[0-9]*-*")]
        return max(numbers, default=0) + 1

    def is_complete(self) -> bool:
        return self.complete_marker.exists()

    def latest_export(self) -> Path | None:
        steps = step_dirs(self.exports)
        return steps[max(steps)] if steps else None

    def create(self) -> None:
        """Make the directory. Raises ConfigError when it cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".writable.{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"The run directory {self.path} cannot be written ({error.strerror}). "
                f"Set run.root to a folder you can write to."
            ) from error


def step_dirs(parent: Path) -> dict[int, Path]:
    """Return the `step_N` folders below `parent`, by N."""
    found = ((_STEP_DIR.fullmatch(p.name), p) for p in parent.glob("step_*"))
    return {int(match.group(1)): path for match, path in found if match}
