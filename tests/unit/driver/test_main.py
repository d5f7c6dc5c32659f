"""Every wait of the driver before its first step is a phase with a deadline."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from hpc_grpo.config import Config
from hpc_grpo.driver import main as train
from hpc_grpo.driver.rollouts import DriverState
from hpc_grpo.driver.schedule import TrainLength
from hpc_grpo.driver.weights import Canary
from hpc_grpo.errors import EXIT_RESUMABLE, ConfigError, EndAskedError
from hpc_grpo.metrics.record import StepTimer
from hpc_grpo.run.contract import PULSE_VARIABLE
from hpc_grpo.run.files import wait_for_space
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.pulse import Beat, read_pulse
from hpc_grpo.types import Prompt
from tests.support.configs import minimal_config


def test_the_driver_shows_its_phase_while_it_reads_the_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PULSE_VARIABLE, str(tmp_path / "pulse"))
    shown: list[Beat] = []

    def look(_: Config, *, is_resume: bool) -> None:
        assert not is_resume
        with (tmp_path / "pulse").open() as file:
            shown.append(read_pulse(file.fileno()))
        raise ConfigError("the end of the test")

    monkeypatch.setattr(train, "read_config", lambda _: minimal_config(deadlines={"start_s": 7.0}))
    monkeypatch.setattr(train, "load_inputs", look)
    with pytest.raises(ConfigError, match="the end of the test"):
        train.train(RunDir(tmp_path))
    assert [(beat.work, beat.limit_s) for beat in shown] == [("inputs", 7.0)]


@pytest.mark.parametrize("is_signal", [True, False], ids=["SIGTERM", "STOP"])
def test_a_driver_that_waits_for_space_can_be_stopped(
    is_signal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, looks = RunDir(tmp_path), [0, 0, 0]

    def loop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM) if is_signal else run_dir.stop_marker.touch()
        wait_for_space(tmp_path, 1, "A checkpoint", lambda _: looks.pop(), retry_s=0.0)

    parts = "load_inputs take_inputs fingerprints connect reserve_nodes Workers save_behind Checkpoints"
    for part in parts.split():
        monkeypatch.setattr(train, part, MagicMock())
    monkeypatch.setattr(train, "read_config", lambda _: minimal_config())
    monkeypatch.setattr(train, "train_length", lambda *_: TrainLength(9, 1, 9))
    monkeypatch.setattr(train, "wait_for_ray", lambda _: "10.0.0.1:6379")
    monkeypatch.setattr(train, "newest_step", lambda _: 5)
    monkeypatch.setattr(train, "_run_loop", loop)
    with pytest.raises(EndAskedError, match="the disk is full") as ended:
        train.train(run_dir)
    assert (ended.value.exit_code, len(looks)) == (EXIT_RESUMABLE, 2)
    assert "Stopping after step 5: the disk is full" in capsys.readouterr().out


def test_a_phase_is_said_when_it_begins_for_the_first_time(capsys: pytest.CaptureFixture[str]) -> None:
    timer = StepTimer(on_phase=partial(train._begin, set()))
    for phase in ("inputs", "start", "publish", "eval", "generate_wait", "train", "publish", "eval"):
        with timer.phase(phase):
            pass
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"Phase: {name}" for name in ("loading the model", "publish", "eval", "generate", "train")]


def test_resuming_and_the_weight_contract_have_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    timer, phases = StepTimer(on_phase=begun.append), {}
    session, workers, inputs = MagicMock(config=minimal_config()), MagicMock(), MagicMock()
    inputs.stream.prompt.return_value = Prompt(0, 0, (1, 2), "", {})
    session.timer = timer

    def resume() -> DriverState:
        phases["resume"] = begun[-1]
        return DriverState()

    def connect_weights(_canary: Canary) -> None:
        phases["connect_weights"] = begun[-1]
        raise ConfigError("the end of the test")

    session.checkpoints.resume, workers.connect_weights = resume, connect_weights
    session.had_ended.return_value = False
    with pytest.raises(ConfigError, match="the end of the test"):
        train._run_loop(session, workers, inputs)
    assert phases == {"resume": "resume", "connect_weights": "weights"}


def test_a_run_that_a_callback_had_ended_before_its_driver_died_takes_no_further_step() -> None:
    session, workers = MagicMock(config=minimal_config()), MagicMock()
    session.timer, session.checkpoints.resume = StepTimer(), lambda: DriverState(4, 40)
    session.had_ended = lambda step: step == 4
    assert train._run_loop(session, workers, MagicMock()) == DriverState(4, 40)
    assert workers.mock_calls == []


@pytest.mark.parametrize(
    ("column", "with_images", "probed"),
    [("image", {3, 5}, 3), ("image", {99}, 0), (None, {3}, 0)],
    ids=["some of the first rows have images", "none of the first 64 has", "a run without images"],
)
def test_the_canary_asks_a_prompt_with_images_if_the_first_rows_have_one(
    column: str | None, with_images: set[int], probed: int
) -> None:
    class Rows:
        def prompt(self, ordinal: int) -> Prompt:
            return Prompt(ordinal, 0, (1,), "", {}, images=(b"png",) * (ordinal in with_images))

    config = minimal_config(data={"images": column})
    assert train._probe(Rows(), config).ordinal == probed  # type: ignore[arg-type]
