"""`hpc-grpo stop` and `cancel` as a user calls them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.command import call
from tests.support.places import FakeQueue
from tests.support.run_builder import RunBuilder


def test_a_run_that_trains_stops_after_its_step(built: RunBuilder) -> None:
    built.attempt(1)
    built.hold(1)
    assert "adder stops after its step and a checkpoint." in call("stop", "adder").output
    assert built.run.stop_marker.exists()


def test_a_run_that_waits_is_stopped_too(built: RunBuilder) -> None:
    built.chain("11")
    printed = call("stop", "adder").output
    assert "No job trains it now" in printed
    assert printed.endswith("hpc-grpo submit adder\n")
    assert built.run.stop_marker.exists()


@pytest.mark.parametrize(
    ("source", "command"), [("local", "hpc-grpo train adder"), ("joined", "the command that started it")]
)
def test_stop_names_the_command_that_started_the_run(source: str, command: str, built: RunBuilder) -> None:
    record = built.attempt(1)
    replace(record, source=source).save(built.folder(record))
    built.hold(1)
    assert call("stop", "adder").output.endswith(f"To resume: {command}\n")


def test_cancel_ends_what_waits_before_what_runs(built: RunBuilder, queue: FakeQueue) -> None:
    built.chain("11", "12", successor="12")
    assert "2 jobs: 11, 12" in call("stop", "--now", str(built.run.path)).output
    assert queue.cancelled == ["12", "11"]
    assert call("stop", "--now", str(built.run.path)).exit_code == 0


@pytest.mark.parametrize("command", ["stop", "stop --now"])
def test_a_complete_run_is_left_as_it_is(command: str, built: RunBuilder, queue: FakeQueue) -> None:
    built.chain("11")
    built.run.complete_marker.touch()
    assert "is complete." in call(*command.split(), str(built.run.path)).output
    assert not built.run.stop_marker.exists()
    assert queue.asked == []
