"""Weights & Biases: optional, and never the reason a run stops."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from hpc_grpo.config import Config, MetricsConfig
from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.run.files import write_atomic
from hpc_grpo.run.paths import RunDir

_INIT_TIMEOUT_S = 60.0

Mode = Literal["online", "offline"]


def wandb_mode(metrics: MetricsConfig, environ: Mapping[str, str] = os.environ) -> Mode | None:
    """How to run W&B; None for not at all. Off by default, it prints which variable would turn it on."""
    wished = environ.get("WANDB_MODE", "")
    if metrics.wandb_mode == "disabled" or wished == "disabled":
        return None
    if metrics.wandb_mode == "offline" or wished == "offline":
        return "offline"
    if environ.get("WANDB_API_KEY"):
        return "online"
    print("W&B is off: WANDB_API_KEY is not set. metrics.wandb_mode = offline logs to the run directory.", flush=True)
    return None


class WandbSink:
    """One W&B run per run: every attempt resumes the id kept in the run directory."""

    def __init__(self, config: Config, run_dir: RunDir, mode: Mode) -> None:
        # Imported here: a second of start-up that only those who use W&B should pay.
        import wandb

        # What wandb raises for a bad key, no network or a refused project. A dead background service shows as
        # a ConnectionError. Anything else is a bug of ours and propagates.
        self._failures: tuple[type[Exception], ...] = (wandb.Error, ConnectionError)
        self._run: Any = None
        try:
            self._run = wandb.init(
                project=config.metrics.wandb_project,
                entity=config.metrics.wandb_entity,
                name=config.run.name,
                id=wandb_run_id(run_dir),
                resume="allow",
                mode=mode,
                dir=str(run_dir.path),
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(console="off", silent=True, init_timeout=_INIT_TIMEOUT_S),
            )
            # Steps trained again after a resume are logged again; W&B's own step may only grow, so it would
            # drop them.
            self._run.define_metric("*", step_metric="step")
        except self._failures as error:
            self._give_up(error)
            return
        where = self._run.url if mode == "online" else f"offline, below {run_dir.path / 'wandb'}"
        print(f"W&B run {self._run.id}: {where}", flush=True)

    def write(self, record: StepRecord) -> None:
        if self._run is None:
            return
        try:
            self._run.log({**record.metrics, "step": record.step, "epoch": record.epoch, "attempt": record.attempt})
        except self._failures as error:
            self._give_up(error)

    def close(self) -> None:
        if self._run is None:
            return
        try:
            self._run.finish()
        except self._failures as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Said once: after it, the sink is silent. Training goes on; metrics.jsonl holds everything."""
        self._run = None
        print(f"W&B failed and is off for the rest of this attempt (metrics.jsonl goes on): {error}", flush=True)


def wandb_run_id(run_dir: RunDir) -> str:
    """The run's W&B id, made on first use."""
    if not run_dir.wandb_id.exists():
        write_atomic(run_dir.wandb_id, secrets.token_hex(4) + "\n")
    return run_dir.wandb_id.read_text().strip()
