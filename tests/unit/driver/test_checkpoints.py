"""When a checkpoint is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import load_config
from hpc_grpo.driver.checkpoints import Checkpoints, DriverState
from hpc_grpo.driver.length import Durations
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.checkpoint import Checkpoint, Manifest, hash_files, write_manifest
from hpc_grpo.run.paths import RunDir, step_dirs


class FakeLearners:
    def __init__(self) -> None:
        self.saved: list[int] = []

    def save_checkpoint(self, path: Path, driver_state: dict[str, Any]) -> None:
        self.saved.append(driver_state["step"])

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        pass

    def export(self, path: Path) -> None:
        path.mkdir(parents=True)


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


def test_a_run_does_not_start_over_because_its_checkpoints_are_damaged(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.checkpoint(4).mkdir(parents=True)
    (run.checkpoint(4) / "weights.pt").touch()
    learners: Any = FakeLearners()
    checkpoints = Checkpoints(load_config("local/debug"), run, learners, Durations())
    with pytest.raises(ConfigError, match="No checkpoint in"):
        checkpoints.resume()
    assert (run.checkpoint(4) / "weights.pt").exists()


def test_a_damaged_newer_checkpoint_is_kept_beside_what_the_run_writes_anew(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (2, 4):
        folder = run.checkpoint(step)
        folder.mkdir(parents=True)
        (folder / "weights.pt").touch()
        write_manifest(folder, Manifest(step, 1, 1, tuple(hash_files(folder, ["weights.pt"])), {"step": step}))
    (run.checkpoint(4) / "weights.pt").write_bytes(b"damage")
    learners: Any = FakeLearners()
    assert Checkpoints(load_config("local/debug"), run, learners, Durations()).resume().step == 2
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_2", "step_4.damaged"]


@pytest.mark.parametrize(("keep", "left"), [("null", [2, 4, 6, 7]), ("2", [6, 7]), ("1", [7])])
def test_the_final_export_stays_with_as_many_before_it_as_are_kept(keep: str, left: list[int], tmp_path: Path) -> None:
    config = load_config("local/debug", ["checkpoint.export_every_steps=2", f"checkpoint.keep_exports={keep}"])
    learners: Any = FakeLearners()
    run = RunDir(tmp_path)
    checkpoints = Checkpoints(config, run, learners, Durations())
    for step in range(1, 8):
        checkpoints.save_if_due(DriverState(step=step))
    checkpoints.export(DriverState(step=7))
    assert sorted(step_dirs(run.exports)) == left
