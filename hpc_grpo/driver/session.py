"""What both loops share: the config, the run directory, the records, the checkpoints and when to stop."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_grpo.config import Config
from hpc_grpo.driver.checkpoints import Checkpoints, DriverState
from hpc_grpo.driver.journal import Journal
from hpc_grpo.driver.step_times import StepTimes
from hpc_grpo.driver.stop import StopRequest
from hpc_grpo.driver.train_length import TrainLength
from hpc_grpo.run.paths import RunDir


@dataclass(frozen=True)
class Session:
    """One driver process's part of a run."""

    config: Config
    run_dir: RunDir
    budget: TrainLength
    journal: Journal
    checkpoints: Checkpoints
    stop: StopRequest
    pace: StepTimes

    def is_complete(self, state: DriverState) -> bool:
        return state.step >= self.budget.total_steps

    def should_go_on(self, state: DriverState, *, evaluates: bool = False) -> bool:
        """Whether to take one more step; `evaluates`: whether an eval is part of it."""
        if self.is_complete(state):
            return False
        reason = self.stop.reason(self.pace.step_and_save_s(evaluates=evaluates))
        if reason is None:
            return True
        print(f"Stopping after step {state.step}: {reason}.", flush=True)
        return False
