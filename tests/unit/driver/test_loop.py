"""The loop, on batches, learners and engines that only note what is asked of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from hpc_grpo.driver.batches import Batch
from hpc_grpo.driver.journal import Session
from hpc_grpo.driver.loop import TrainingLoop
from hpc_grpo.driver.rollouts import DriverState
from hpc_grpo.driver.schedule import StepTimes, TrainLength
from hpc_grpo.errors import ConfigError, EngineLostError, HpcGrpoError, LaunchError, RewardError, WeightSyncError
from hpc_grpo.metrics.record import StepTimer
from hpc_grpo.run.paths import RunDir
from tests.support.configs import minimal_config

TOTAL_STEPS = 3


class FakeRun:
    """Everything around the loop: batches, learners, weights, eval, journal, checkpoints and the request to stop.

    `fails` maps what is done, such as "eval 2", to the error it raises; an eval is due every `eval_every` steps.
    """

    def __init__(
        self,
        fails: dict[str, Exception] | None = None,
        *,
        total_steps: int = TOTAL_STEPS,
        with_engines: bool = True,
        eval_every: int = 1,
        colocate: bool = False,
        lag: int = 0,
        ends_after: int | None = None,
    ) -> None:
        self.done: list[str] = []
        self.evals: list[dict[str, float]] = []
        self.is_writing = False
        self.timer = StepTimer()
        self._fails = fails or {}
        self._total_steps, self._eval_every = total_steps, eval_every
        self._taken = self._trained = 0
        own: Any = self
        length = TrainLength(total_steps, items_per_step=10, items_per_epoch=100)
        config = minimal_config(
            train={"total_steps": total_steps},
            placement={"colocate": colocate},
            rollout={"max_policy_lag": lag},
        )
        self.end_reason, self._ends_after, self.on_step = "", ends_after, ""
        callback = None if ends_after is None else own
        self.session = Session(config, RunDir(Path()), length, own, own, own, StepTimes.after(None), callback)
        engines = (own, own) if with_engines else (None, None)
        self.loop = TrainingLoop(self.session, own, own, *engines)

    def _do(self, what: str) -> None:
        self.done.append(what)
        if error := self._fails.get(what):
            raise error

    def start(self, policy_version: int) -> None:
        self._do(f"start {policy_version}")

    def take_step(self, policy_version: int, timer: StepTimer) -> Batch:
        self._taken += 1
        self._do(f"take {self._taken}")
        return Batch([], range(10 * self._taken - 10, 10 * self._taken), {"reward/mean": 1.0})

    def train(self, batch: Batch, record: Path | None) -> dict[str, float]:
        self._trained += 1
        self._do(f"train {self._trained}")
        return {"loss/policy": 1.0}

    def publish(self, version: int) -> dict[str, float]:
        self._do(f"publish {version}")
        return {"mismatch/canary": 0.0}

    def put_engines_to_sleep(self) -> None:
        self._do(f"sleep {self._taken}")

    def is_due(self, step: int, in_s: float) -> bool:
        return step % self._eval_every == 0 or step == self._total_steps

    def run(self, step: int) -> dict[str, float]:
        self._do(f"eval {step}")
        return {"eval/pass@1": 0.5}

    def record_eval(self, step: int, metrics: dict[str, float]) -> None:
        self.done.append(f"record eval {step}")
        self.evals.append(metrics)

    def record_step(self, state: DriverState, metrics: dict[str, float], batch: Batch) -> None:
        self._do(f"record {state.step} {' '.join(sorted(metrics))}")

    def note(self, step: int, metrics: dict[str, float]) -> None:
        self.done.append(f"note eval {step}")

    def ask(self, step: int, metrics: dict[str, float]) -> str:
        self._do(f"ask {step} {' '.join(sorted(metrics))}")
        self.end_reason = "enough" if step == self._ends_after else ""
        return self.end_reason

    def save(self, state: DriverState) -> None:
        self._do(f"save {state.step} {state.next_ordinal}")

    def save_if_due(self, state: DriverState) -> None:
        self.done.append(f"save if due {state.step}")

    def reason(self, step_and_save_s: float) -> str | None:
        return None


def failing(run: FakeRun, error: type[HpcGrpoError] | type[RuntimeError], match: str | None = None) -> list[str]:
    """Run into `error`; what was done, without starts and checkpoints."""
    with pytest.raises(error, match=match):
        run.loop.run(DriverState())
    return [line for line in run.done if not line.startswith(("start", "save if due"))]


def test_a_step_goes_from_its_batch_over_weights_and_eval_to_its_record_and_checkpoint() -> None:
    run = FakeRun(total_steps=1)
    assert run.loop.run(DriverState()) == DriverState(1, 10)
    assert run.done == [
        *["publish 0", "eval 0", "record eval 0", "start 0"],
        *["take 1", "train 1", "publish 1", "eval 1", "start 1"],
        *["record 1 eval/pass@1 loss/policy mismatch/canary reward/mean", "save if due 1"],
    ]


@pytest.mark.parametrize(
    ("lag", "first"),
    [
        (0, ["publish 0", "eval 0", "record eval 0", "start 0"]),
        (1, ["publish 0", "start 0", "eval 0", "record eval 0"]),
    ],
)
def test_new_prompts_wait_for_an_eval_only_where_a_resumed_run_must_meet_the_same_batches(
    lag: int, first: list[str]
) -> None:
    run = FakeRun(total_steps=2, eval_every=1, lag=lag)
    run.loop.run(DriverState())
    assert run.done[:4] == first
    assert (run.done.index("start 1") < run.done.index("eval 1")) == (lag > 0)


def test_engines_that_share_gpus_sleep_from_the_batch_to_the_publish() -> None:
    run = FakeRun(total_steps=2, eval_every=9, colocate=True)
    run.loop.run(DriverState())
    order = [line for line in run.done if line.split()[0] in ("take", "sleep", "train", "publish")]
    assert order == [
        "publish 0",
        *(f"{what} {step}" for step in (1, 2) for what in ("take", "sleep", "train", "publish")),
    ]


def test_engines_that_do_not_fall_asleep_lose_no_step() -> None:
    run = FakeRun({"sleep 2": EngineLostError("died")}, colocate=True)
    assert failing(run, EngineLostError)[-1] == "save 1 10"


def test_a_task_without_engines_publishes_and_evaluates_nothing() -> None:
    run = FakeRun(total_steps=1, with_engines=False)
    assert run.loop.run(DriverState()) == DriverState(1, 10)
    assert run.done == ["start 0", "take 1", "train 1", "start 1", "record 1 loss/policy reward/mean", "save if due 1"]


def test_an_eval_is_run_and_time_kept_for_it_only_where_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    run, reserved = FakeRun(total_steps=6, eval_every=4), []

    def step_and_save_s(times: StepTimes, *, evaluates: bool, num_saves: int) -> float:
        reserved.append(evaluates)
        return 0.0

    monkeypatch.setattr(StepTimes, "step_and_save_s", step_and_save_s)
    run.loop.run(DriverState())
    assert [line for line in run.done if line.startswith("eval")] == ["eval 0", "eval 4", "eval 6"]
    assert [before for before, evaluates in enumerate(reserved) if evaluates] == [3, 5], "each before its step"


def test_a_reward_that_fails_over_a_step_loses_none() -> None:
    for error in (RewardError, ConfigError):
        run = FakeRun({"take 3": error("sympy is gone")})
        assert failing(run, error, "sympy is gone")[-2:] == ["take 3", "save 2 20"]


def test_an_eval_that_failed_is_repeated_by_the_resume_and_recorded_with_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the run directory of a FakeRun
    step = {"step": 3, "attempt": 1, "time": 1.0, "loss/policy": 1.0}
    for recorded, evaluates in ((step, True), ({**step, "eval/pass@1": 0.5}, False)):
        Path("metrics.jsonl").write_text(json.dumps(recorded) + "\n")
        run = FakeRun()
        assert run.loop.run(DriverState(3, 30)) == DriverState(3, 30)
        assert run.done == ["publish 3", *(["eval 3", "record eval 3"] if evaluates else []), "start 3"]
        assert run.evals == ([{"loss/policy": 1.0, "eval/pass@1": 0.5}] if evaluates else [])


def test_a_reward_that_fails_over_an_eval_loses_no_step() -> None:
    """The step before it is on record when it is saved: a resumed run does not train on its prompts again."""
    run = FakeRun({"eval 2": RewardError("sympy is gone")})
    done = failing(run, RewardError, "sympy is gone")
    assert done[-3:] == ["eval 2", "record 2 loss/policy mismatch/canary reward/mean", "save 2 20"]


@pytest.mark.parametrize(
    ("over", "saved"), [("take 3", "save 2 20"), ("publish 3", "save 3 30"), ("start 3", "save 3 30")]
)
def test_an_engine_that_fails_for_good_loses_no_step(over: str, saved: str) -> None:
    done = failing(FakeRun({over: EngineLostError("an engine died")}), EngineLostError)
    assert done[-1] == saved
    recorded = [line.split()[1] for line in done if line.startswith("record") and "eval 0" not in line]
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
def test_a_save_that_fails_hides_no_cause(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    failing(FakeRun({"take 3": RewardError("sympy is gone"), "save 2 20": error}), RewardError, "sympy is gone")
    cause, failed = capsys.readouterr().out.split("Step 2 could not be saved: ")
    assert cause == "Saving before ending: sympy is gone\n"
    assert failed == f"{error}\n"


def test_weights_that_may_be_damaged_are_not_saved() -> None:
    run = FakeRun({"publish 2": WeightSyncError("checksum mismatch in bucket 0")})
    assert failing(run, WeightSyncError)[-1] == "publish 2"


def test_an_error_of_the_learners_saves_nothing() -> None:
    run = FakeRun({"train 2": RuntimeError("the gradient is not finite")})
    assert failing(run, RuntimeError)[-1] == "train 2"


@pytest.mark.parametrize(
    ("eval_every", "evaluated_before", "evaluated_after"),
    [(1, ["eval 2"], []), (9, [], ["eval 2"])],
    ids=["the step has an eval", "the step has none, and the end gets one"],
)
def test_a_callback_ends_the_run_after_a_step_with_an_eval_and_starts_no_further_prompts(
    eval_every: int, evaluated_before: list[str], evaluated_after: list[str]
) -> None:
    run = FakeRun(total_steps=5, eval_every=eval_every, ends_after=2)
    assert run.loop.run(DriverState()) == DriverState(2, 20)
    seen = " ".join([*(["eval/pass@1"] if evaluated_before else []), "loss/policy mismatch/canary reward/mean"])
    after_publish = run.done[run.done.index("publish 2") + 1 :]
    assert after_publish == [
        *evaluated_before,
        f"ask 2 {seen}",
        *evaluated_after,
        "record 2 eval/pass@1 loss/policy mismatch/canary reward/mean",
    ]
    assert "note eval 0" in run.done
    assert (run.session.end_reason, run.on_step) == ("enough", "enough")
