from __future__ import annotations

import pytest

from hpc_grpo.config import Config
from hpc_grpo.driver.checkpoints import DriverState
from hpc_grpo.driver.journal import Journal
from hpc_grpo.driver.step_times import StepTimes
from hpc_grpo.driver.train_length import TrainLength
from hpc_grpo.metrics.timing import StepTimer
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_state


def test_the_eval_before_the_first_step_is_known_to_the_next_attempt(
    config: Config, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = StepTimes.after(None)
    budget = TrainLength(total_steps=95, items_per_step=1, items_per_epoch=95)
    journal = Journal(config, run_dir, budget, pace, StepTimer())
    times = [{"time/start_s": 500.0, "time/eval_s": 300.0, "time/step_s": 800.0}, {"time/step_s": 10.0}]
    monkeypatch.setattr(journal.timer, "finish_step", lambda: times.pop(0))
    journal.record_eval(0, {"eval/pass@1": 0.25})
    assert not pace.steps.is_measured, "what comes before the first step is no step"
    journal.record_step(DriverState(1, 1), {"tokens/completion_total": 100.0}, [0])
    journal.close()
    state = read_state(run_dir)
    assert state is not None
    assert (state.step_p95_s, state.eval_p95_s) == (10.0, 300.0)
    assert StepTimes.after(state).evals.p95_s == 300.0
