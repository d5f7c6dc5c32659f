"""What a loop is told when it asks whether to take one more step."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from hpc_grpo.driver import loop as grpo
from hpc_grpo.driver.checkpoints import DriverState
from hpc_grpo.driver.session import Session
from hpc_grpo.driver.step_times import StepTimes
from hpc_grpo.driver.stop import StopRequest
from hpc_grpo.driver.train_length import TrainLength
from hpc_grpo.run.contract import ENDS_AT_VARIABLE
from hpc_grpo.run.paths import RunDir


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in handled}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_time_for_a_step_is_not_taken_for_time_for_a_step_with_an_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ENDS_AT_VARIABLE, str(time.time() + 250))
    pace = StepTimes.after(None)
    pace.saves.add(20.0)
    for eval_s in [0.0] * 19 + [290.0]:
        pace.add_step({"time/step_s": 10.0 + eval_s, **({"time/eval_s": eval_s} if eval_s else {})})
    run_dir, unused = RunDir(tmp_path), MagicMock()
    budget = TrainLength(total_steps=100, items_per_step=1, items_per_epoch=100)
    session = Session(unused, run_dir, budget, unused, unused, StopRequest(run_dir), pace)
    assert session.should_go_on(DriverState(38), evaluates=False)
    assert not session.should_go_on(DriverState(39), evaluates=True)
    assert capsys.readouterr().out.startswith("Stopping after step 39: the end of the allocation (350 s kept")


def test_the_loop_says_which_steps_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []

    def should_go_on(state: DriverState, *, evaluates: bool) -> bool:
        asked.append((state.step, evaluates))
        return state.step < 6

    def rollout_metrics(groups: Sequence[Any], policy_version: int) -> dict[str, float]:
        return {}

    monkeypatch.setattr(grpo, "rollout_metrics", rollout_metrics)
    monkeypatch.setattr(grpo, "write_rollouts", MagicMock())
    session, rollouts, learners, evaluation = MagicMock(), MagicMock(), MagicMock(), MagicMock()
    session.should_go_on = should_go_on
    session.budget.total_steps = 6
    session.config.train.num_minibatches = 1
    rollouts.take_step.return_value = [SimpleNamespace(prompt=SimpleNamespace(ordinal=0))]
    learners.train_on_groups.return_value = {}
    evaluation.is_due.side_effect = lambda step, total_steps: step % 4 == 0 or step == total_steps
    evaluation.run.return_value = {"eval/pass@1": 0.5}
    grpo.GrpoLoop(session, rollouts, learners, MagicMock(), evaluation).run(DriverState())
    assert [step for step, evaluates in asked if evaluates] == [3, 5], "each before the step that evaluates"
    assert [call.args for call in evaluation.run.call_args_list] == [(0,), (4,), (6,)]
