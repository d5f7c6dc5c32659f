"""The metrics that a driver wrote are read back as they survived."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.metrics.sinks import JsonlSink
from hpc_grpo.run.files import write_record
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import MetricColumns, RunState, read_metrics, read_state, write_state


def make_record(step: int, attempt: int, reward: float) -> StepRecord:
    return StepRecord(step=step, total_steps=9, attempt=attempt, time_s=5.0, metrics={"reward/mean": reward})


def test_a_line_holds_step_attempt_time_and_metrics(run_dir: RunDir, record: StepRecord) -> None:
    sink = JsonlSink(run_dir.metrics)
    sink.write(record)
    # Before close: a reader follows a run while it trains.
    line = json.loads(run_dir.metrics.read_text())
    sink.close()
    assert line == {"step": 6, "attempt": 1, "time": 1000.0, **record.metrics}


def test_an_attempt_undoes_later_steps_and_the_file_is_only_appended_to(run_dir: RunDir) -> None:
    first = JsonlSink(run_dir.metrics)
    for step in (1, 2, 3):
        first.write(make_record(step, attempt=1, reward=0.1 * step))
    first.close()
    written = run_dir.metrics.read_text()
    second = JsonlSink(run_dir.metrics)
    second.write(make_record(2, attempt=2, reward=0.7))
    second.close()
    assert run_dir.metrics.read_text().startswith(written)
    metrics = read_metrics(run_dir.metrics)
    assert list(metrics) == [1, 2]
    assert (metrics[2]["attempt"], metrics[2]["reward/mean"]) == (2, 0.7)


def test_a_driver_that_restarts_within_an_attempt_undoes_later_steps_too(run_dir: RunDir) -> None:
    write(run_dir, 1, 0, 1, 2, 3)
    write(run_dir, 1, 2)
    assert list(read_metrics(run_dir.metrics)) == [0, 1, 2]


def test_a_line_torn_by_a_crash_does_not_spoil_the_next(run_dir: RunDir) -> None:
    whole = JsonlSink(run_dir.metrics)
    whole.write(make_record(1, attempt=1, reward=0.5))
    whole.close()
    with run_dir.metrics.open("a") as file:
        file.write('{"step": 2, "attem')
    assert list(read_metrics(run_dir.metrics)) == [1]
    resumed = JsonlSink(run_dir.metrics)
    resumed.write(make_record(2, attempt=2, reward=0.6))
    resumed.close()
    assert {step: line["reward/mean"] for step, line in read_metrics(run_dir.metrics).items()} == {1: 0.5, 2: 0.6}


def test_a_value_that_is_not_finite_is_null_in_json_and_nan_for_readers(run_dir: RunDir, record: StepRecord) -> None:
    sink = JsonlSink(run_dir.metrics)
    sink.write(dataclasses.replace(record, metrics={"loss/policy": math.nan, "policy/grad_norm": math.inf}))
    sink.close()
    line = json.loads(run_dir.metrics.read_text(), parse_constant=lambda name: 1 / 0)
    assert line["loss/policy"] is None
    assert math.isnan(read_metrics(run_dir.metrics)[6]["policy/grad_norm"])


@pytest.mark.parametrize("value", ["1e400", str(10**400), "null", '"much"'])
def test_what_is_no_finite_number_in_a_line_reads_as_nan(run_dir: RunDir, value: str) -> None:
    run_dir.metrics.write_text(f'{{"step": 6, "attempt": 1, "reward/mean": {value}, "lr": 1}}\n')
    line = read_metrics(run_dir.metrics)[6]
    assert math.isnan(line["reward/mean"])
    assert (line["step"], line["lr"]) == (6, 1)


def test_a_run_without_metrics_file_has_no_metrics(run_dir: RunDir) -> None:
    assert read_metrics(run_dir.metrics) == {}


def write(run: RunDir, attempt: int, *steps: int) -> None:
    sink = JsonlSink(run.metrics)
    for step in steps:
        sink.write(make_record(step, attempt, reward=step + attempt / 10))
    sink.close()


def test_columns_are_read_on_and_hold_each_step_of_a_resumed_run_once(run_dir: RunDir) -> None:
    columns = MetricColumns(run_dir.metrics)
    columns.read()
    assert (list(columns.steps), columns.last()) == ([], {})
    write(run_dir, 1, 0, 1, 2, 3)
    columns.read()
    before = run_dir.metrics.stat().st_size
    write(run_dir, 2, 2, 3, 4)
    with run_dir.metrics.open("r+b") as file:
        file.write(b"x" * (before - 1))  # what was read is not read again
    columns.read()
    assert columns.points("reward/mean") == {0: 0.1, 1: 1.1, 2: 2.2, 3: 3.2, 4: 4.2}
    assert columns.last()["attempt"] == 2
    run_dir.metrics.unlink()
    write(run_dir, 1, 0)
    columns.read()  # another file, as of a run that began anew
    assert list(columns.steps) == [0]


def test_a_long_run_is_thinned_to_means_between_the_lowest_and_the_highest_values(run_dir: RunDir) -> None:
    write(run_dir, 0, *range(10))
    columns = MetricColumns(run_dir.metrics)
    columns.read()
    steps, metrics = columns.thinned(4)
    assert steps == [2, 5, 8, 9]
    assert metrics["reward/mean"] == [[1, 4, 7, 9], [0, 3, 6, 9], [2, 5, 8, 9]]
    assert columns.thinned(10)[1]["reward/mean"] == [[float(step) for step in range(10)]]


def test_state_is_published_whole_and_read_back(run_dir: RunDir) -> None:
    assert read_state(run_dir) is None
    state = RunState(step=3, total_steps=9, attempt=2, phase="training", reward=0.5, eta_s=12.0, heartbeat=99.0)
    write_state(run_dir, state)
    assert read_state(run_dir) == state
    assert json.loads(run_dir.state.read_text())["tokens_per_s"] is None
    assert [path.name for path in run_dir.path.iterdir()] == ["state.json"]


def test_a_state_that_a_newer_version_wrote_is_read_without_what_it_knows_more(run_dir: RunDir) -> None:
    state = RunState(step=3, total_steps=9, attempt=2, phase="training", heartbeat=99.0)
    write_record(run_dir.state, {**dataclasses.asdict(state), "watts": 700.0})
    assert read_state(run_dir) == state
