"""The loop, on learners and engines that only note what is asked of them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from hpc_grpo.driver import loop as grpo
from hpc_grpo.driver.checkpoints import DriverState
from hpc_grpo.driver.loop import GrpoLoop
from hpc_grpo.errors import EngineLostError, LaunchError, RewardError, WeightSyncError

TOTAL_STEPS = 3


class FakeRun:
    """Everything around the loop; `fails` maps what is done, such as "eval 2", to the error it raises."""

    def __init__(self, fails: dict[str, Exception], total_steps: int = TOTAL_STEPS) -> None:
        self.done: list[str] = []
        self._fails = fails
        self._step = 0
        timer = SimpleNamespace(phase=lambda name: nullcontext(), start_over=lambda: None)
        session = SimpleNamespace(
            config=SimpleNamespace(train=SimpleNamespace(num_minibatches=1)),
            budget=SimpleNamespace(total_steps=total_steps),
            run_dir=Path(),
            journal=SimpleNamespace(timer=timer, record_step=self._record_step, record_eval=lambda *_: None),
            checkpoints=SimpleNamespace(save=self._save, save_if_due=lambda state: None),
            should_go_on=lambda state, evaluates: state.step < total_steps,
        )
        rollouts = SimpleNamespace(take_step=self._take_step, start_prompts=lambda _: None, num_engine_restarts=0)
        learners = SimpleNamespace(train_on_groups=self._train, advantages=lambda group: ())
        weights = SimpleNamespace(publish=lambda version: self._do(f"publish {version}"))
        evaluation = SimpleNamespace(is_due=lambda *_: True, run=self._evaluate)
        self.loop = GrpoLoop(session, rollouts, learners, weights, evaluation)  # type: ignore[arg-type]

    def _do(self, what: str) -> None:
        self.done.append(what)
        if error := self._fails.get(what):
            raise error

    def _take_step(self, policy_version: int) -> list[Any]:
        self._do(f"take {self._step + 1}")
        return [SimpleNamespace(prompt=SimpleNamespace(ordinal=10 * self._step + 9))]

    def _train(self, groups: Any) -> dict[str, float]:
        self._step += 1
        self._do(f"train {self._step}")
        return {"loss": 1.0}

    def _evaluate(self, step: int) -> dict[str, float]:
        self._do(f"eval {step}")
        return {"eval/pass@1": 0.5}

    def _record_step(self, state: DriverState, metrics: dict[str, float], ordinals: list[int]) -> None:
        self._do(f"record {state.step} {' '.join(sorted(metrics))}")

    def _save(self, state: DriverState) -> None:
        self._do(f"save {state.step} {state.next_ordinal}")


@pytest.fixture(autouse=True)
def no_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "rollout_metrics", lambda groups, version: {})
    monkeypatch.setattr(grpo, "write_rollouts", lambda *_: None)


def test_steps_are_recorded_with_their_evals() -> None:
    run = FakeRun({}, total_steps=1)
    assert run.loop.run(DriverState()) == DriverState(1, 10)
    steps = ["publish 0", "eval 0", "take 1", "train 1", "publish 1", "eval 1"]
    assert run.done == [*steps, "record 1 engine/restarts eval/pass@1 loss"]


def test_reward_that_fails_over_a_step_loses_none() -> None:
    run = FakeRun({"take 3": RewardError("sympy is gone")})
    with pytest.raises(RewardError, match="sympy is gone"):
        run.loop.run(DriverState())
    assert run.done[-2:] == ["take 3", "save 2 20"]


def test_reward_that_fails_over_an_eval_loses_no_step() -> None:
    """The step before it is on record when it is saved: a resumed run does not train on its prompts again."""
    run = FakeRun({"eval 2": RewardError("sympy is gone")})
    with pytest.raises(RewardError, match="sympy is gone"):
        run.loop.run(DriverState())
    assert run.done[-3:] == ["eval 2", "record 2 engine/restarts loss", "save 2 20"]


@pytest.mark.parametrize(("over", "saved"), [("take 3", "save 2 20"), ("publish 3", "save 3 30")])
def test_engine_that_fails_for_good_loses_no_step(over: str, saved: str) -> None:
    run = FakeRun({over: EngineLostError("an engine died")})
    with pytest.raises(EngineLostError):
        run.loop.run(DriverState())
    assert run.done[-1] == saved
    recorded = [line.split()[1] for line in run.done if line.startswith("record")]
    assert recorded == [str(step) for step in range(1, int(saved.split()[1]) + 1)]


@pytest.mark.parametrize(
    "error",
    [
        LaunchError("Waited 900 s for the checkpoint"),
        RayTaskError("save_checkpoint", "traceback", OSError("disk quota exceeded")).as_instanceof_cause(),
        ActorDiedError(),
    ],
    ids=type,
)
def test_save_that_fails_hides_no_cause(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun({"take 3": RewardError("sympy is gone"), "save 2 20": error})
    with pytest.raises(RewardError, match="sympy is gone"):
        run.loop.run(DriverState())
    cause, failed = capsys.readouterr().out.split("Step 2 could not be saved: ")
    assert cause == "Saving before ending: sympy is gone\n"
    assert failed == f"{error}\n"


def test_weights_that_may_be_damaged_are_not_saved() -> None:
    run = FakeRun({"publish 2": WeightSyncError("checksum mismatch in bucket 0")})
    with pytest.raises(WeightSyncError):
        run.loop.run(DriverState())
    assert run.done[-1] == "publish 2"


def test_error_of_the_learners_saves_nothing() -> None:
    run = FakeRun({"train 2": RuntimeError("the gradient is not finite")})
    with pytest.raises(RuntimeError):
        run.loop.run(DriverState())
    assert run.done[-1] == "train 2"
