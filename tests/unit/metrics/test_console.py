from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.metrics.sinks import ConsoleSink, plain_line

LINE = (
    "Step 6/95 epoch 1/5 reward 0.531 lag 0 mismatch 1e-06 tokens/s 1.2k eta 0:02:10"
    " | generate 61% train 30% publish 4%"
)


def test_a_log_gets_exactly_this_line(record: StepRecord, capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink()
    sink.write(record)
    sink.close()
    assert capsys.readouterr().out == LINE + "\n"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"metrics": {"reward/mean": 0.5, "eval/pass@1": 0.25}}, "Step 6/95 epoch 1/5 reward 0.500 pass@1 0.250"),
        ({"metrics": {"loss/policy": 1.23456}}, "Step 6/95 epoch 1/5 loss 1.2346"),
        ({"step": 0, "metrics": {"eval/pass@1": 0.1}}, "Step 0/95 epoch 1/5 pass@1 0.100"),
    ],
    ids=["with an eval", "without a reward", "the eval before the first step"],
)
def test_the_line_shows_what_the_step_has(record: StepRecord, changes: dict[str, Any], line: str) -> None:
    assert plain_line(dataclasses.replace(record, **changes)) == line


def test_log_line_is_not_wrapped_in_a_narrow_terminal(
    record: StepRecord, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    ConsoleSink().write(record)
    assert capsys.readouterr().out.count("\n") == 1
