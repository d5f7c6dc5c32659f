from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hpc_grpo.driver.schedule import StopRequest
from hpc_grpo.run.contract import ENDS_AT_VARIABLE
from hpc_grpo.run.paths import RunDir

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def test_without_a_request_the_run_goes_on(tmp_path: Path) -> None:
    assert StopRequest(RunDir(tmp_path)).reason(5.0) is None


@pytest.mark.parametrize("number", HANDLED)
def test_a_signal_ends_the_run_after_the_step(tmp_path: Path, number: signal.Signals) -> None:
    stop = StopRequest(RunDir(tmp_path))
    os.kill(os.getpid(), number)
    assert stop.reason(0.0) == f"signal {number.name}"


@pytest.mark.parametrize(("left_s", "reason"), [(180, None), (3600, "signal SIGUSR1")])
def test_a_warning_counts_only_where_it_means_an_end_sooner_than_known(
    left_s: int, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDS_AT_VARIABLE, str(time.time() + left_s))
    stop = StopRequest(RunDir(tmp_path))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.reason(1.0) == reason


def test_a_signal_that_another_library_took_is_listened_to_again(tmp_path: Path) -> None:
    stop = StopRequest(RunDir(tmp_path))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stop.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.reason(0.0) == "signal SIGTERM"


def test_a_second_interrupt_ends_the_driver_at_once(tmp_path: Path) -> None:
    stop = StopRequest(RunDir(tmp_path))
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.reason(0.0) == "signal SIGINT"


def test_the_stop_file_counts_while_it_is_there(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    stop = StopRequest(run_dir)
    run_dir.stop_marker.touch()
    assert stop.reason(0.0) == "the STOP file"
    run_dir.stop_marker.unlink()
    assert stop.reason(0.0) is None


@pytest.mark.parametrize(("left_s", "step_s", "stops"), [(3600, 60, False), (89, 60, True), (29, 0, True)])
def test_an_end_of_the_allocation_too_near_for_a_step_and_a_save_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: float, step_s: float, stops: bool
) -> None:
    monkeypatch.setenv(ENDS_AT_VARIABLE, str(time.time() + left_s))
    reason = StopRequest(RunDir(tmp_path)).reason(step_s)
    assert (reason is not None) == stops
    if stops:
        assert reason is not None
        assert "the end of the allocation" in reason
