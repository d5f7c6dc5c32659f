"""The records of a run, and how long a session goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, MagicMock

import pytest

from hpc_grpo.config import Config
from hpc_grpo.config.train import CallbackConfig
from hpc_grpo.driver.batches import Batch
from hpc_grpo.driver.callback import StepCallback
from hpc_grpo.driver.journal import Journal, Session
from hpc_grpo.driver.rollouts import DriverState
from hpc_grpo.driver.schedule import StepTimes, StopRequest, TrainLength
from hpc_grpo.metrics.record import StepTimer
from hpc_grpo.run.contract import ENDS_AT_VARIABLE
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.paths import RunDir, step_dirs
from hpc_grpo.run.progress import read_metrics, read_state
from tests.support.configs import minimal_config

LENGTH = TrainLength(total_steps=95, items_per_step=1, items_per_epoch=95)
METRICS = {"tokens/completion_total": 100.0}


@pytest.fixture
def clock() -> list[float]:
    """What the timer's clock shows, in seconds: set its only item."""
    return [0.0]


@pytest.fixture
def make_journal(config: Config, run_dir: RunDir, clock: list[float]) -> Callable[[StepTimes], Journal]:
    return lambda times: Journal(config, run_dir, LENGTH, times, StepTimer(lambda: clock[0]))


def test_the_eval_before_the_first_step_is_known_to_the_next_attempt(
    make_journal: Callable[[StepTimes], Journal], run_dir: RunDir, clock: list[float]
) -> None:
    times = StepTimes.after(None)
    journal = make_journal(times)
    with journal.timer.phase("start"):
        clock[0] = 500.0
    with journal.timer.phase("eval"):
        clock[0] = 800.0
    journal.record_eval(0, {"eval/pass@1": 0.25})
    assert not times.steps.is_measured, "what comes before the first step is no step"
    clock[0] = 810.0
    journal.record_step(DriverState(1, 1), METRICS, Batch([], [0], {}))
    journal.close()
    state = read_state(run_dir)
    assert state is not None
    assert (state.step_p95_s, state.eval_p95_s) == (10.0, 300.0)
    assert read_metrics(run_dir.metrics)[1]["data/epochs"] == pytest.approx(1 / 95)
    assert StepTimes.after(state).evals.p95_s == 300.0


def test_an_attempt_that_trains_no_step_keeps_the_runs_reward(
    make_journal: Callable[[StepTimes], Journal], run_dir: RunDir, clock: list[float]
) -> None:
    journal = make_journal(StepTimes.after(None))
    clock[0] = 10.0
    journal.record_step(DriverState(1, 1), {**METRICS, "reward/mean": 0.15}, Batch([], [0], {}))
    journal.close()
    make_journal(StepTimes.after(None)).publish_state(1, "complete")
    state = read_state(run_dir)
    assert state is not None and (state.phase, state.reward) == ("complete", 0.15)


def test_the_groups_of_a_step_under_way_are_told_now_and_then_until_the_step_ends(
    make_journal: Callable[[StepTimes], Journal], run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, now = make_journal(StepTimes.after(None)), [100.0]
    monkeypatch.setattr("hpc_grpo.driver.journal.time.monotonic", lambda: now[0])

    def told() -> tuple[int, int, int]:
        state = read_state(run_dir)
        assert state is not None
        return state.num_groups, state.sampled, state.graded

    def trained() -> tuple[int, int]:
        state = read_state(run_dir)
        assert state is not None
        assert state.phase == "training", "its first step has begun"
        return state.trained, state.num_microbatches

    journal.note_groups("rollouts", 4, 1, 0)
    assert read_state(run_dir) is None, "no step is known yet"
    journal.publish_state(0, "starting")
    journal.note_groups("rollouts", 4, 2, 1)
    assert told() == (0, 0, 0), "just published"
    now[0] += 6
    journal.note_groups("rollouts", 4, 3, 1)
    journal.note_groups("rollouts", 4, 3, 2)
    assert told() == (4, 3, 1)
    journal.note_groups("rollouts", 4, 4, 4)
    assert told() == (4, 4, 4), "the last one is told at once"
    journal.note_microbatches(2, 6)
    assert (told(), trained()) == ((4, 4, 4), (2, 6))
    now[0] += 6
    journal.note_groups("an eval", 8, 1, 0)
    assert (told(), trained()) == ((8, 1, 0), (0, 0))
    journal.publish_state(1, "training")
    journal.close()
    assert told() == (0, 0, 0)


@pytest.mark.parametrize("lines", [(), ({"ordinal": 7, "completion": "#### 3"}, {"ordinal": 7, "completion": "?"})])
def test_a_step_leaves_its_ordinals_and_the_rollouts_that_were_kept(
    lines: tuple[dict[str, Any], ...],
    make_journal: Callable[[StepTimes], Journal],
    run_dir: RunDir,
    clock: list[float],
) -> None:
    journal = make_journal(StepTimes.after(None))
    clock[0] = 2.0
    journal.record_step(DriverState(3, 8), METRICS, Batch([], [7], {}, lines))
    journal.close()
    assert run_dir.rollouts(3).exists() == bool(lines)
    assert [*read_jsonl(run_dir.rollouts(3))] == [*lines] if lines else True
    assert [line["ordinals"] for line in read_jsonl(run_dir.ledger)] == [[7]]


def test_time_for_a_step_is_not_taken_for_time_for_a_step_with_an_eval(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ENDS_AT_VARIABLE, str(time.time() + 250))
    times, unused, saved = StepTimes.after(None), None, SimpleNamespace(is_writing=False)
    times.saves.add(20.0)
    for eval_s in [0.0] * 19 + [290.0]:
        times.add_step({"time/step_s": 10.0 + eval_s, **({"time/eval_s": eval_s} if eval_s else {})})
    run_dir: Any = RunDir(tmp_path)
    session = Session(config, run_dir, LENGTH, unused, saved, StopRequest(run_dir), times)  # type: ignore[arg-type]
    assert session.should_go_on(DriverState(38), evaluates=False)
    assert not session.should_go_on(DriverState(39), evaluates=True)
    assert capsys.readouterr().out.startswith("Stopping after step 39: the end of the allocation (350 s kept")


def test_the_batches_of_the_newest_steps_are_kept_and_a_resume_replaces_those_of_steps_it_takes_again(
    run_dir: RunDir,
) -> None:
    unused: Any = None
    config = minimal_config(checkpoint={"keep_batches": 2})
    session = Session(config, run_dir, unused, unused, unused, unused, unused)
    for step, kept in ((1, [1]), (2, [1, 2]), (3, [2, 3]), (4, [3, 4]), (3, [3])):
        folder = session.batch_record(step)
        assert folder == run_dir.batches(step)
        folder.mkdir(parents=True, exist_ok=True)
        assert sorted(step_dirs(folder.parent)) == kept
    silent = Session(minimal_config(), run_dir, unused, unused, unused, unused, unused)
    assert silent.batch_record(5) is None


@pytest.mark.parametrize(("seconds", "named"), [(2.0, "node n2 takes 2.00 times as long as the others do"), (1.1, "")])
def test_a_node_that_takes_notably_longer_is_in_the_state(
    make_journal: Callable[[StepTimes], Journal], run_dir: RunDir, clock: list[float], seconds: float, named: str
) -> None:
    journal = make_journal(StepTimes.after(None))
    nodes = {"node/sample_s/n1": 1.0, "node/sample_s/n2": seconds, "node/median_s": 1.0}
    for step in range(1, 6):
        clock[0] += 3.0
        journal.record_step(DriverState(step, step), METRICS | nodes, Batch([], [step], {}))
        state = read_state(run_dir)
        assert state is not None
        assert state.slow_node == (named if step == 5 else "")
    journal.close()


@pytest.mark.parametrize(("step", "asked"), [(0, []), (1, [1]), (2, [2]), (3, [])])
def test_a_resumed_run_asks_the_callback_again_after_the_step_of_its_checkpoint(
    make_journal: Callable[[StepTimes], Journal],
    run_dir: RunDir,
    clock: list[float],
    tmp_path: Path,
    step: int,
    asked: list[int],
) -> None:
    """A driver may have died between the checkpoint and COMPLETE. The metrics are those that the step had."""
    file = tmp_path / "mine.py"
    file.write_text(
        "CALLS = []\ndef on_step(step, metrics, evals):\n    CALLS.append((step, metrics, evals))\n"
        "    return 'enough' if metrics['reward/mean'] > 0.5 else None\n"
    )
    callback = StepCallback(CallbackConfig(name=f"{file}:on_step"), 60.0)
    calls: list[Any] = callback._function.func.__globals__["CALLS"]  # type: ignore[attr-defined]
    journal, unused = make_journal(StepTimes.after(None)), None
    with journal.timer.phase("eval"):
        clock[0] = 1.0
    journal.record_eval(0, {"eval/pass@1": 0.25})
    for number, reward in ((1, 0.5), (2, 0.75)):
        clock[0] += 2.0
        journal.record_step(DriverState(number, number), {**METRICS, "reward/mean": reward}, Batch([], [number], {}))
    parts: Any = (run_dir, LENGTH, journal, unused, unused, unused, callback)
    session = Session(minimal_config(), *parts)
    assert session.had_ended(step) == (step == 2)
    journal.close()
    assert (session.end_reason, journal.on_step) == (("enough", "enough") if step == 2 else ("", ""))
    assert [call[0] for call in calls] == asked
    for _, metrics, evals in calls:
        assert evals == {0: {"eval/pass@1": 0.25}}
        assert metrics.keys() >= {"reward/mean", "tokens/completion_total"}
        assert not [name for name in metrics if name in ("step", "attempt") or name.startswith("time")]


def test_an_eval_of_a_resumed_step_joins_what_is_recorded_of_it(
    make_journal: Callable[[StepTimes], Journal], run_dir: RunDir, clock: list[float]
) -> None:
    journal, unused = make_journal(StepTimes.after(None)), None
    parts: Any = (run_dir, LENGTH, journal, unused, unused, unused)
    session = Session(minimal_config(), *parts)
    clock[0] = 2.0
    journal.record_step(DriverState(1, 1), METRICS, Batch([], [0], {}))
    before = read_metrics(run_dir.metrics)[1]
    assert session.lacks_eval(1)
    with journal.timer.phase("eval"):
        clock[0] = 9.0
    session.record_eval(1, {"eval/pass@1": 0.25})
    journal.close()
    own = {"time": ANY, "eval/pass@1": 0.25, "time/eval_s": 7.0}
    assert read_metrics(run_dir.metrics) == {1: {**before, **own}}
    assert not session.lacks_eval(1)


def test_the_eval_of_step_0_is_taken_again(
    make_journal: Callable[[StepTimes], Journal], run_dir: RunDir, clock: list[float]
) -> None:
    """A run that has not trained may resume with another model or other eval sets."""
    journal, unused = make_journal(StepTimes.after(None)), None
    parts: Any = (run_dir, LENGTH, journal, unused, unused, unused)
    session = Session(minimal_config(), *parts)
    for name in ("eval/old/pass@1", "eval/new/pass@1"):
        assert session.lacks_eval(0)
        with journal.timer.phase("eval"):
            clock[0] += 1.0
        session.record_eval(0, {name: 0.25})
    journal.close()
    assert [name for name in read_metrics(run_dir.metrics)[0] if name.startswith("eval/")] == ["eval/new/pass@1"]


def test_a_sink_that_cannot_be_closed_leaves_no_other_open(make_journal: Callable[[StepTimes], Journal]) -> None:
    journal, first, last = make_journal(StepTimes.after(None)), MagicMock(), MagicMock()
    first.close.side_effect = last.close.side_effect = OSError("the disk is full")
    journal._sinks = [first, MagicMock(), last]
    with pytest.raises(OSError, match="the disk is full"):
        journal.close()
    assert [sink.close.call_count for sink in journal._sinks] == [1, 1, 1]
