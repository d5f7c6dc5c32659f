"""What both loops share: the config, the run directory, the records, the checkpoints and when to stop."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_grpo.budget import Budget
from hpc_grpo.checkpoints import Checkpoints, DriverState
from hpc_grpo.config import Config
from hpc_grpo.journal import Journal
from hpc_grpo.pace import Pace
from hpc_grpo.run_dir import RunDir
from hpc_grpo.stopping import StopRequest


@dataclass(frozen=True)
class Session:
    """One driver process's part of a run."""

    config: Config
    run_dir: RunDir
    budget: Budget
    journal: Journal
    checkpoints: Checkpoints
    stop: StopRequest
    pace: Pace

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
