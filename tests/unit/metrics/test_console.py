from __future__ import annotations

import dataclasses
import io
import logging
import sys
from typing import Any

import pytest
from rich.console import Console

from hpc_grpo.metrics.console import ConsoleSink, plain_line
from hpc_grpo.metrics.record import StepRecord

LINE = (
    "Step 6/95 epoch 1/5 reward 0.531 lag 0 mismatch 1e-06 tokens/s 1.2k eta 0:02:10"
    " | generate 61% train 30% publish 4%"
)


def test_a_log_gets_exactly_this_line(record: StepRecord, capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink("adder")
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
    ConsoleSink("adder").write(record)
    assert capsys.readouterr().out.count("\n") == 1


@pytest.fixture
def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, height=40, _environ={"TERM": "xterm"})


def test_panel_keeps_the_last_eval_and_the_history(terminal: Console, record: StepRecord) -> None:
    sink = ConsoleSink("adder", terminal)
    sink.write(dataclasses.replace(record, step=5, metrics={"eval/pass@1": 0.25}))
    sink.write(record)
    sink.close()
    last_frame = terminal.file.getvalue().rpartition("adder")[2]
    for shown in ("6/95", "pass@1 at step 5", "0.250", "Step 5/95 epoch 1/5 pass@1", "generate", "61%"):
        assert shown in last_frame


def test_log_messages_pass_above_the_panel_and_handlers_are_given_back(terminal: Console, record: StepRecord) -> None:
    stderr = sys.stderr
    handler = logging.StreamHandler(stderr)
    logging.getLogger().addHandler(handler)
    try:
        sink = ConsoleSink("adder", terminal)
        sink.write(record)
        logging.getLogger("anything").warning("engine 1 restarted")
        print("from a print")
        sink.close()
        assert handler.stream is stderr
        assert sys.stderr is stderr
    finally:
        logging.getLogger().removeHandler(handler)
    shown = terminal.file.getvalue()
    assert "engine 1 restarted" in shown
    assert "from a print" in shown
    # The frame is drawn again below the message.
    assert shown.rindex("engine 1 restarted") < shown.rindex("6/95")
