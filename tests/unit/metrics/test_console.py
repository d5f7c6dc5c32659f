from __future__ import annotations

import dataclasses
import io
import logging
import sys

import pytest
from rich.console import Console

from hpc_grpo.metrics.console import ConsoleSink, plain_line
from hpc_grpo.metrics.record import StepRecord

LINE = (
    "Epoch 1/5 step 6/19 global step 6 reward 0.531 lag 0 mismatch 1e-06 tokens/s 1.2k eta 0:02:10"
    " | generate 61% train 30% publish 4%"
)


def test_a_log_gets_exactly_this_line(record: StepRecord, capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink("adder")
    sink.write(record)
    sink.close()
    assert capsys.readouterr().out == LINE + "\n"


def test_the_line_of_a_step_with_an_eval_shows_pass_at_1(record: StepRecord) -> None:
    evaluated = dataclasses.replace(record, metrics={"reward/mean": 0.5, "eval/pass@1": 0.25})
    line = plain_line(evaluated)
    assert line == "Epoch 1/5 step 6/19 global step 6 reward 0.500 pass@1 0.250"


def test_the_line_of_the_first_eval_shows_step_0() -> None:
    before = StepRecord(step=0, total_steps=9, total_epochs=2, steps_per_epoch=5, metrics={"eval/pass@1": 0.1})
    assert plain_line(before).startswith("Epoch 1/2 global step 0 ")
    assert plain_line(before).endswith("pass@1 0.100")


def test_loss_is_shown_where_there_is_no_reward(record: StepRecord) -> None:
    sft = dataclasses.replace(record, metrics={"loss/policy": 1.23456})
    assert plain_line(sft) == "Epoch 1/5 step 6/19 global step 6 loss 1.2346"


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
    sink.write(dataclasses.replace(record, step=5, step_in_epoch=5, metrics={"eval/pass@1": 0.25}))
    sink.write(record)
    sink.close()
    last_frame = terminal.file.getvalue().rpartition("adder")[2]
    assert "6/95" in last_frame
    assert "pass@1 at step 5" in last_frame
    assert "0.250" in last_frame
    assert "global step 5 pass@1" in last_frame
    assert "generate" in last_frame and "61%" in last_frame


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
