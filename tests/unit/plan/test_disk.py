"""A run's budget on disk, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpc_grpo.config.train import PpoTask
from hpc_grpo.plan.disk import (
    BATCH_BYTES_PER_TOKEN,
    checkpoint_bytes,
    disk_budget,
    num_checkpoints,
    num_exports,
    room_for,
)
from hpc_grpo.plan.text import size_sections
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.disk import Room, room_in
from hpc_grpo.types import GIB
from tests.support.sequences import ordinary_sequence
from tests.unit.plan.plan_configs import plan_shipped_7b, planned_config

P = 7_615_616_512
ROOM = Room(1000 * GIB, "free")


def test_the_shipped_7b_run_keeps_three_checkpoints_and_three_exports_at_most() -> None:
    disk = disk_budget(plan_shipped_7b("7B", 2), ROOM)
    assert [part.num_bytes for part in disk.sure] == [3 * 12 * P, 3 * 2 * P]
    rollouts, lines = disk.estimated
    steps = -(-1_000_000 // 1024)
    assert rollouts.num_bytes == pytest.approx(steps * 0.1 * 1024 * (5120 * 4 + 400), rel=1e-6)
    assert lines.num_bytes == steps * 4096
    assert disk.fits
    assert disk.folder == plan_shipped_7b("7B", 2).config.run_path


def test_kept_batches_count_as_many_steps_as_there_are_with_the_longest_sequences() -> None:
    plan = plan_shipped_7b("7B", 2)
    for keep, kept in ((3, 3), (5000, -(-1_000_000 // 1024))):
        checkpoint = plan.config.checkpoint.model_copy(update={"keep_batches": keep})
        changed = replace(plan, config=plan.config.model_copy(update={"checkpoint": checkpoint}))
        (batches,) = [part for part in disk_budget(changed, ROOM).estimated if part.name == "batches"]
        assert batches.num_bytes == kept * 1024 * 5120 * BATCH_BYTES_PER_TOKEN


def test_kept_batches_count_the_experts_that_learners_replay() -> None:
    plan = plan_shipped_7b("7B", 2, "checkpoint.keep_batches=1", "train.router_replay=true")
    shape = replace(plan.model.shape, num_experts=8, experts_per_token=2)
    budget = disk_budget(replace(plan, model=replace(plan.model, shape=shape)), ROOM)
    (batches,) = [part for part in budget.estimated if part.name == "batches"]
    assert batches.num_bytes == 1024 * 5120 * (BATCH_BYTES_PER_TOKEN + 2 * 28)


def test_the_bytes_of_a_kept_token_are_those_of_the_arrays_that_are_kept() -> None:
    sequence = ordinary_sequence(0, 0, range(5), 2, [-0.5, -0.5], advantage=1.0)
    sequence = replace(sequence, policy_versions=np.zeros(5, np.int32))
    arrays = [value for value in vars(sequence).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == 5 * BATCH_BYTES_PER_TOKEN


@pytest.mark.parametrize(
    ("dtype", "stage", "each"),
    [("bfloat16", 1, 14), ("bfloat16", 2, 14), ("bfloat16", 3, 12), ("float32", 1, 16), ("float32", 3, 12)],
)
def test_stages_1_and_2_save_the_weights_once_more(dtype: str, stage: int, each: int) -> None:
    config = planned_config(model={"path": "m", "dtype": dtype}, train={"zero_stage": stage})
    assert checkpoint_bytes(config, 1000) == each * 1000
    assert checkpoint_bytes(config.model_copy(update={"task": PpoTask()}), 1000) == 2 * each * 1000


@pytest.mark.parametrize(
    ("checkpoint", "steps", "checkpoints", "exports"),
    [
        ({"every": 50, "keep_last": 2}, 1000, 3, 1),
        ({"every": 50, "keep_last": 2}, None, 3, 1),
        ({"every": None, "keep_last": 5}, 1000, 2, 1),
        ({"every": 5, "keep_last": 9}, 10, 4, 1),
        ({"every": "5 steps, 10 min", "keep_last": 9}, 10, 10, 1),
        ({"every": "1 epoch", "keep_last": 9}, 10, 10, 1),
        ({"export_every": "1 epoch", "keep_exports": 2}, 1000, 3, 3),
        ({"export_every": 100}, 1000, 3, 10),
        ({"export_every": 100}, 1050, 3, 11),
        ({"export_every": "100 steps, 600 s"}, 1000, 3, 10),
        ({"export_every": "600 s"}, 1000, 3, 1),
        ({"export_every": 100, "keep_exports": 2}, 1000, 3, 3),
        ({"export_every": 100, "keep_exports": 2}, None, 3, 3),
        ({"export_every": 900, "keep_exports": 9}, 1000, 3, 2),
    ],
)
def test_what_is_on_disk_at_once(
    checkpoint: dict[str, int | None], steps: int | None, checkpoints: int, exports: int
) -> None:
    config = planned_config(checkpoint=checkpoint)
    assert (num_checkpoints(config, steps), num_exports(config, steps)) == (checkpoints, exports)


@pytest.mark.parametrize(
    ("checkpoint", "is_least"),
    [
        ({"export_every": "600 s"}, True),
        ({"export_every": "1 step, 1 epoch"}, True),
        ({"export_every": "600 s", "keep_exports": 2}, False),
        ({"export_every": 10}, False),
        ({}, False),
    ],
)
def test_a_number_of_exports_that_nobody_knows_is_said_to_be_the_least(
    checkpoint: dict[str, int], is_least: bool
) -> None:
    plan = plan_shipped_7b("7B", 2)
    config = plan.config.model_copy(
        update={"checkpoint": planned_config(checkpoint={"keep_exports": None, **checkpoint}).checkpoint}
    )
    exports = disk_budget(replace(plan, config=config), ROOM).sure[1]
    assert exports.name == "exports"
    assert exports.formula.endswith("checkpoint.keep_exports = null keeps all") is is_least


def test_a_lora_run_whose_targets_match_nothing_is_left_to_its_own_error() -> None:
    plan = plan_shipped_7b("7B", 2)
    lora = planned_config(lora={"targets": ["q_prj"]}).lora
    budget = disk_budget(replace(plan, config=plan.config.model_copy(update={"lora": lora})), ROOM)
    assert budget.sure == (), "nothing is trained"


def test_a_disk_without_room_for_checkpoints_is_too_small_and_one_without_room_for_long_rollouts_may_do() -> None:
    plan = plan_shipped_7b("7B", 2)
    sure = disk_budget(plan, ROOM).sure_bytes
    full, tight = disk_budget(plan, Room(sure - 1, "free")), disk_budget(plan, Room(sure, "left of the user quota"))
    assert full.is_too_large
    assert not tight.is_too_large
    assert not tight.fits
    assert list(size_sections(plan, full))[-1].endswith(" free: DOES NOT FIT")
    assert list(size_sections(plan, tight))[-1].endswith("left of the user quota: fits if completions stay shorter")


def test_what_a_run_has_written_is_not_asked_for_twice(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.checkpoint(1).mkdir(parents=True)
    (run.checkpoint(1) / "weights.pt").write_bytes(b"w" * 2**23)
    assert room_for([run]).num_bytes - room_in(tmp_path).num_bytes == pytest.approx(2**23, abs=2**22)
