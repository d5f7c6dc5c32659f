"""Every wait of the driver before its first step is a phase with a deadline."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from hpc_grpo.config import Config, DeadlinesConfig
from hpc_grpo.driver import main as train
from hpc_grpo.driver.checkpoints import DriverState
from hpc_grpo.errors import ConfigError
from hpc_grpo.metrics.timing import StepTimer
from hpc_grpo.run.contract import ATTEMPT_DIR_VARIABLE, STUCK_NAME
from hpc_grpo.run.paths import RunDir


def test_inputs_that_hang_end_the_driver_at_the_deadline_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = tmp_path / STUCK_NAME

    def hang(_: Config) -> None:
        ends_at = time.monotonic() + 20
        while not stuck.exists() and time.monotonic() < ends_at:
            time.sleep(0.02)
        raise ConfigError("the end of the test")

    monkeypatch.setenv(ATTEMPT_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(train, "load_resolved", lambda _: SimpleNamespace(deadlines=DeadlinesConfig(start_s=0.1)))
    monkeypatch.setattr(train, "load_inputs", hang)
    with pytest.raises(ConfigError, match="the end of the test"):
        train.train(RunDir(tmp_path))
    assert stuck.read_text() == "The driver was in 'start' for more than deadlines.start_s = 0.1."


def test_resuming_and_the_weight_contract_have_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, phases = StepTimer(), {}
    session, workers = MagicMock(), MagicMock()
    session.timer = timer

    def resume() -> DriverState:
        phases["resume"] = timer.current[0]
        return DriverState()

    def connect_weights() -> None:
        phases["connect_weights"] = timer.current[0]
        raise ConfigError("the end of the test")

    session.checkpoints.resume, workers.connect_weights = resume, connect_weights
    with pytest.raises(ConfigError, match="the end of the test"):
        train._run_loop(session, workers, MagicMock())
    assert phases == {"resume": "resume", "connect_weights": "start"}
    deadlines = {key.removesuffix("_s") for key, _ in DeadlinesConfig()}
    assert set(phases.values()) <= deadlines
