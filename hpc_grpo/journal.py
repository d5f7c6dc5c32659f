"""The run's records: every finished step goes to the sinks, state.json and the ledger from here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hpc_grpo.budget import Budget
from hpc_grpo.checkpoints import DriverState
from hpc_grpo.config import Config
from hpc_grpo.ledger import Ledger
from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.metrics.sinks import make_sinks
from hpc_grpo.metrics.state import RunState, write_state
from hpc_grpo.metrics.timing import StepTimer
from hpc_grpo.run_dir import RunDir

ATTEMPT_VARIABLE = "HPC_GRPO_ATTEMPT"


class Journal:
    """Times the phases of a step and publishes its metrics when it ends."""

    def __init__(self, config: Config, run_dir: RunDir, budget: Budget) -> None:
        self._run_dir = run_dir
        self._budget = budget
        self._attempt = int(os.environ.get(ATTEMPT_VARIABLE, "1"))
        self._sinks = make_sinks(config, run_dir)
        self._ledger = Ledger(run_dir, self._attempt)
        self.timer = StepTimer()

    @property
    def last_step_s(self) -> float:
        """The median time of recent steps, 0 before the first."""
        return self.timer.eta_s(1) or 0.0

    def record_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """The eval before the first step; later ones are part of their step's record."""
        self._write(step, {**metrics, **self.timer.finish_step()})

    def record_step(self, state: DriverState, metrics: Mapping[str, float], ordinals: Sequence[int]) -> None:
        """Publish a finished step, and which ordinals it trained on."""
        step = state.step
        times = self.timer.finish_step()
        tokens_per_s = metrics["tokens/completion_total"] / times["time/step_s"]
        eta_s = self.timer.eta_s(self._budget.total_steps - step)
        self._ledger.append(step, ordinals)
        self._write(step, {**metrics, **times, "throughput/tokens_per_s": tokens_per_s, "time/eta_s": eta_s or 0.0})
        write_state(
            self._run_dir,
            RunState(
                step,
                self._budget.total_steps,
                self._attempt,
                "training",
                metrics.get("reward/mean"),
                tokens_per_s,
                eta_s,
            ),
        )

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        epoch, step_in_epoch = self._budget.epoch_and_step(step)
        record = StepRecord(
            step=step,
            total_steps=self._budget.total_steps,
            metrics=metrics,
            attempt=self._attempt,
            epoch=epoch,
            total_epochs=self._budget.total_epochs,
            step_in_epoch=step_in_epoch,
            steps_per_epoch=self._budget.steps_per_epoch,
        )
        for sink in self._sinks:
            sink.write(record)
