"""The run directory: the only state of a run. Every path is made here; every publish is atomic."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_grpo.errors import ConfigError

_STEP_DIR = re.compile(r"step_(\d+)$")


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Publish `text` at `path` so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def write_json_atomic(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a JSONL file; a last line cut by a crash is skipped."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def drop_torn_line(path: Path) -> None:
    """Cut off a last line that a crash left unfinished: the next append would glue a record to it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            file.truncate(end)
            os.fsync(file.fileno())


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. See the table in docs/architecture.md for who writes each and what it means."""

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
        """Which ordinals each step trained on; append-only, see ledger.py."""
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
        """Which attempt is training the run, and its last sign of life; see launch/holder.py."""
        return self.path / "holder.json"

    @property
    def chain(self) -> Path:
        """The run's Slurm jobs; see launch/chain.py."""
        return self.path / "chain.json"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def slurm_logs(self) -> Path:
        """Job scripts and outputs of submitted jobs."""
        return self.path / "slurm"

    def slurm_log(self, job_id: str) -> Path:
        """The output of a job that `hpc-grpo` handed in."""
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
        """Make the directory; raises ConfigError when it cannot be written."""
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
    """The `step_N` folders below `parent`, by N."""
    found = ((_STEP_DIR.fullmatch(p.name), p) for p in parent.glob("step_*"))
    return {int(match.group(1)): path for match, path in found if match}
