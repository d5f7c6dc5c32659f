"""When a checkpoint is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import load_config
from hpc_grpo.driver.checkpoints import Checkpoints, DriverState
from hpc_grpo.driver.length import Durations
from hpc_grpo.run.paths import RunDir


class FakeLearners:
    def __init__(self) -> None:
        self.saved: list[int] = []

    def save_checkpoint(self, path: Path, driver_state: dict[str, Any]) -> None:
        self.saved.append(driver_state["step"])


@pytest.mark.parametrize(
    ("every_steps", "durations", "saved"),
    [
        ("3", Durations(), [1, 3, 6]),
        ("null", Durations(), [1]),
        ("3", Durations(earlier_p95_s=20.0), [3, 6]),  # an attempt before has measured it
    ],
)
def test_a_run_saves_after_its_first_step_to_know_how_long_that_takes(
    every_steps: str, durations: Durations, saved: list[int], tmp_path: Path
) -> None:
    config = load_config("local/debug", [f"checkpoint.every_steps={every_steps}"])
    learners: Any = FakeLearners()
    checkpoints = Checkpoints(config, RunDir(tmp_path), learners, durations)
    for step in range(1, 8):
        checkpoints.save_if_due(DriverState(step=step))
    assert learners.saved == saved
