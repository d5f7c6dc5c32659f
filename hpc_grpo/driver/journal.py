"""The run's records: every finished step goes to the sinks, state.json and the ledger from here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hpc_grpo.config import Config
from hpc_grpo.driver.checkpoints import DriverState
from hpc_grpo.driver.step_times import StepTimes
from hpc_grpo.driver.train_length import TrainLength
from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.metrics.sinks import make_sinks
from hpc_grpo.metrics.timing import StepTimer
from hpc_grpo.run.contract import ATTEMPT_VARIABLE
from hpc_grpo.run.ledger import Ledger
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import Phase, RunState, write_state


class Journal:
    """Times the phases of a step and publishes its metrics when it ends."""

    def __init__(self, config: Config, run_dir: RunDir, budget: TrainLength, pace: StepTimes, timer: StepTimer) -> None:
        self._run_dir = run_dir
        self._budget = budget
        self._pace = pace
        self._metrics: Mapping[str, float] = {}
        self._attempt = int(os.environ.get(ATTEMPT_VARIABLE, "1"))
        self._sinks = make_sinks(config, run_dir)
        self._ledger = Ledger(run_dir, self._attempt)
        self.timer = timer

    def record_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """The eval before the first step; later ones are part of their step's record."""
        times = self.timer.finish_step()
        self._pace.evals.add(times["time/eval_s"])
        self._write(step, {**metrics, **times})

    def record_step(self, state: DriverState, metrics: Mapping[str, float], ordinals: Sequence[int]) -> None:
        """Publish a finished step, and which ordinals it trained on."""
        step = state.step
        times = self.timer.finish_step()
        tokens_per_s = metrics["tokens/completion_total"] / times["time/step_s"]
        eta_s = self.timer.eta_s(self._budget.total_steps - step)
        self._ledger.append(step, ordinals)
        self._pace.add_step(times)
        self._metrics = {**metrics, **times, "throughput/tokens_per_s": tokens_per_s, "time/eta_s": eta_s or 0.0}
        self._write(step, self._metrics)
        self.publish_state(step, "training")

    def publish_state(self, step: int, phase: Phase) -> None:
        """Tell readers of the run directory where the run stands."""
        state = RunState(
            step=step,
            total_steps=self._budget.total_steps,
            attempt=self._attempt,
            phase=phase,
            reward=self._metrics.get("reward/mean"),
            tokens_per_s=self._metrics.get("throughput/tokens_per_s"),
            eta_s=self._metrics.get("time/eta_s"),
            step_p95_s=self._pace.steps.p95_s,
            eval_p95_s=self._pace.evals.p95_s,
            save_p95_s=self._pace.saves.p95_s,
        )
        write_state(self._run_dir, state)

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
