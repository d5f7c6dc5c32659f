"""When a checkpoint is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import load_config
from hpc_grpo.driver.learners import Checkpoints
from hpc_grpo.driver.rollouts import DriverState
from hpc_grpo.driver.schedule import Durations, TrainLength
from hpc_grpo.errors import ConfigError, HpcGrpoError
from hpc_grpo.run.checkpoint import Checkpoint, Manifest, hash_files, write_manifest
from hpc_grpo.run.paths import RunDir, step_dirs

LENGTH = TrainLength(total_steps=100, items_per_step=4, items_per_epoch=10)


class FakeLearners:
    """Learners whose checkpoints behind training are not on the disk before they are waited for."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.done: list[str] = []
        self.error: Exception | None = None

    def begin_checkpoint(self, path: Path, driver_state: dict[str, Any], *, behind: bool) -> Path:
        self.saved.append(driver_state["step"])
        self.done.append(f"stage {driver_state['step']}{' behind' if behind else ''}")
        return path

    def seconds_of(self, writing: Path, *, waits: bool) -> float | None:
        if not waits:
            return None
        if self.error is not None:
            raise self.error
        self.done.append(f"{writing.name} written")
        write_checkpoint(writing)
        return 7.0

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        pass

    def export(self, path: Path) -> None:
        self.done.append(f"export {path.name}")
        path.mkdir(parents=True)


def write_checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "weights.pt").touch()
    step = int(folder.name.removeprefix("step_"))
    write_manifest(folder, Manifest(step, 1, 1, tuple(hash_files(folder, ["weights.pt"])), {"step": step}))


def on_disk(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


@pytest.mark.parametrize(
    ("every", "durations", "saved"),
    [
        ("3", Durations(), [1, 3, 6]),
        ("null", Durations(), [1]),
        ("3", Durations(earlier_p95_s=20.0), [3, 6]),  # an attempt before has measured it
    ],
)
def test_a_run_saves_after_its_first_step_to_know_how_long_that_takes(
    every: str, durations: Durations, saved: list[int], tmp_path: Path
) -> None:
    config = load_config("local/debug", [f"checkpoint.every={every}"])
    learners: Any = FakeLearners()
    checkpoints = Checkpoints(config, RunDir(tmp_path), learners, durations, LENGTH)
    for step in range(1, 8):
        checkpoints.save_if_due(DriverState(step=step))
    assert learners.saved == saved


def test_a_run_does_not_start_over_because_its_checkpoints_are_damaged(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.checkpoint(4).mkdir(parents=True)
    (run.checkpoint(4) / "weights.pt").touch()
    learners: Any = FakeLearners()
    checkpoints = Checkpoints(load_config("local/debug"), run, learners, Durations(), LENGTH)
    with pytest.raises(ConfigError, match="No checkpoint in"):
        checkpoints.resume()
    assert (run.checkpoint(4) / "weights.pt").exists()


def test_a_damaged_newer_checkpoint_is_kept_beside_what_the_run_writes_anew(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (2, 4):
        write_checkpoint(run.checkpoint(step))
    (run.checkpoint(4) / "weights.pt").write_bytes(b"damage")
    learners: Any = FakeLearners()
    assert Checkpoints(load_config("local/debug"), run, learners, Durations(), LENGTH).resume().step == 2
    assert on_disk(run) == ["step_2", "step_4.damaged"]


@pytest.fixture
def learners() -> Any:
    return FakeLearners()


def checkpoints_of(learners: Any, folder: Path, *settings: str) -> Checkpoints:
    config = load_config("local/debug", ["checkpoint.every=1", "checkpoint.keep_last=1", *settings])
    return Checkpoints(config, RunDir(folder), learners, Durations(), LENGTH)


def test_one_checkpoint_is_on_its_way_to_the_disk_and_the_next_waits_for_it(learners: Any, tmp_path: Path) -> None:
    checkpoints = checkpoints_of(learners, tmp_path)
    for step in (1, 2):
        checkpoints.save_if_due(DriverState(step))
    assert learners.done == ["stage 1 behind", "step_1 written", "stage 2 behind"]
    assert checkpoints.is_writing


def test_older_checkpoints_stay_until_the_next_is_whole(learners: Any, tmp_path: Path) -> None:
    checkpoints = checkpoints_of(learners, tmp_path)
    for step in (1, 2):
        checkpoints.save_if_due(DriverState(step))
    assert on_disk(RunDir(tmp_path)) == ["step_1"]
    checkpoints.close()
    assert on_disk(RunDir(tmp_path)) == ["step_2"]


@pytest.mark.parametrize("already_staged", [True, False])
def test_the_last_checkpoint_is_waited_for(learners: Any, already_staged: bool, tmp_path: Path) -> None:
    checkpoints = checkpoints_of(learners, tmp_path)
    checkpoints.save_if_due(DriverState(1))
    checkpoints.save(DriverState(1 if already_staged else 2))
    assert learners.done[1:] == ["step_1 written", *([] if already_staged else ["stage 2", "step_2 written"])]
    assert not checkpoints.is_writing


def test_a_write_that_fails_is_an_error_of_the_run_and_the_step_can_be_saved_again(
    learners: Any, tmp_path: Path
) -> None:
    checkpoints = checkpoints_of(learners, tmp_path)
    checkpoints.save_if_due(DriverState(1))
    learners.error = HpcGrpoError("Checkpoint step_1 could not be written: the disk is gone.")
    with pytest.raises(HpcGrpoError, match="the disk is gone"):
        checkpoints.save_if_due(DriverState(2))
    learners.error = None
    checkpoints.save(DriverState(1))
    assert learners.done[1:] == ["stage 1", "step_1 written"]


def test_a_run_may_wait_for_the_disk_instead(learners: Any, tmp_path: Path) -> None:
    checkpoints_of(learners, tmp_path, "checkpoint.behind_training=false").save_if_due(DriverState(1))
    assert learners.done == ["stage 1", "step_1 written"]


def test_a_step_is_saved_before_its_export_which_may_outlast_the_allocation(learners: Any, tmp_path: Path) -> None:
    words = ["checkpoint.every=null", "checkpoint.export_every=2", "checkpoint.behind_training=false"]
    checkpoints = checkpoints_of(learners, tmp_path, *words)
    for step in (1, 2, 3):
        checkpoints.save_if_due(DriverState(step))
    assert learners.done[2:] == ["stage 2", "step_2 written", "export step_2"]


def test_an_export_that_was_cut_is_written_by_the_resume(learners: Any, tmp_path: Path) -> None:
    write_checkpoint(RunDir(tmp_path).checkpoint(2))
    for exports in (["export step_2"], []):
        assert checkpoints_of(learners, tmp_path, "checkpoint.export_every=2").resume() == DriverState(2)
        assert learners.done == exports
        learners.done.clear()


@pytest.mark.parametrize(("keep", "left"), [("null", [2, 4, 6, 7]), ("2", [6, 7]), ("1", [7])])
def test_the_final_export_stays_with_as_many_before_it_as_are_kept(keep: str, left: list[int], tmp_path: Path) -> None:
    config = load_config("local/debug", ["checkpoint.export_every=2", f"checkpoint.keep_exports={keep}"])
    learners: Any = FakeLearners()
    run = RunDir(tmp_path)
    checkpoints = Checkpoints(config, run, learners, Durations(), LENGTH)
    for step in range(1, 8):
        checkpoints.save_if_due(DriverState(step=step))
    checkpoints.export(DriverState(step=7))
    assert sorted(step_dirs(run.exports)) == left
