"""What of a run may go, and what never does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.checkpoint import Manifest, hash_files, newest_step, remove_checkpoint, write_manifest
from hpc_grpo.run.paths import RunDir, step_dirs
from hpc_grpo.run.retention import (
    prune_exports,
    refuse_unless_newest_is_whole,
    removable,
    taken_on_disk,
    usage,
)

BYTES = 4096


def save(run: RunDir, *steps: int) -> None:
    for step in steps:
        folder = run.checkpoint(step)
        folder.mkdir(parents=True)
        (folder / "weights.pt").write_bytes(b"w" * BYTES)
        write_manifest(folder, Manifest(step, 1, 1, tuple(hash_files(folder, ["weights.pt"])), {"step": step}))


def export(run: RunDir, *steps: int) -> None:
    for step in steps:
        run.export(step).mkdir(parents=True)
        (run.export(step) / "model.safetensors").write_bytes(b"m" * BYTES)


def paths(run: RunDir) -> list[str]:
    return sorted(str(item.path.relative_to(run.path)) for item in removable(run))


def test_older_checkpoints_and_exports_and_what_cut_saves_left_may_go(run_dir: RunDir) -> None:
    save(run_dir, 2, 4, 6)
    export(run_dir, 3, 6)
    (run_dir.checkpoints / ".step_8.tmp").mkdir()
    (run_dir.exports / ".step_9.tmp").mkdir()
    (run_dir.checkpoints / "step_5.damaged").mkdir()
    assert paths(run_dir) == [
        "checkpoints/.step_8.tmp",
        "checkpoints/step_2",
        "checkpoints/step_4",
        "checkpoints/step_5.damaged",
        "export/.step_9.tmp",
        "export/step_3",
    ]
    for item in removable(run_dir):
        remove_checkpoint(item.path)
    assert removable(run_dir) == []
    assert (newest_step(run_dir), list(step_dirs(run_dir.exports))) == (6, [6])


def test_a_newer_checkpoint_that_is_not_whole_stays_and_so_does_the_newest_whole_one(run_dir: RunDir) -> None:
    save(run_dir, 2, 4)
    run_dir.checkpoint(6).mkdir()
    assert paths(run_dir) == ["checkpoints/step_2"]


def test_without_a_whole_checkpoint_none_goes(run_dir: RunDir) -> None:
    for step in (2, 4):
        run_dir.checkpoint(step).mkdir(parents=True)
    (run_dir.checkpoints / "step_3.damaged").mkdir()
    assert removable(run_dir) == []


def test_a_link_is_the_users_and_stays(run_dir: RunDir, tmp_path: Path) -> None:
    save(run_dir, 4)
    (tmp_path / "elsewhere").mkdir()
    run_dir.checkpoint(2).symlink_to(tmp_path / "elsewhere")
    assert removable(run_dir) == []


def test_what_is_retired_is_not_touched_since_it_may_be_the_only_copy(run_dir: RunDir) -> None:
    save(run_dir, 4)
    (run_dir.checkpoints / ".step_6.old").mkdir()
    assert removable(run_dir) == []


def test_older_checkpoints_stay_where_the_newest_has_other_bytes_than_its_manifest_says(run_dir: RunDir) -> None:
    save(run_dir, 2, 4)
    items = removable(run_dir)
    refuse_unless_newest_is_whole(run_dir, items)
    (run_dir.checkpoint(4) / "weights.pt").write_bytes(b"x" * BYTES)
    with pytest.raises(ConfigError, match=r"step_4 is damaged.*Nothing of this run was removed"):
        refuse_unless_newest_is_whole(run_dir, items)
    refuse_unless_newest_is_whole(run_dir, [])


@pytest.mark.parametrize(
    ("keep", "newest", "left"),
    [
        (None, 8, [2, 4, 6, 8, 10]),
        (1, 8, [8, 10]),  # 10: of steps that a crash undid
        (3, 8, [4, 6, 8, 10]),
        (9, 8, [2, 4, 6, 8, 10]),
        (1, 2, [2, 4, 6, 8, 10]),
    ],
)
def test_the_oldest_exports_go_and_never_the_one_just_written(
    keep: int | None, newest: int, left: list[int], run_dir: RunDir
) -> None:
    export(run_dir, 2, 4, 6, 8, 10)
    prune_exports(run_dir, newest, keep)
    assert sorted(step_dirs(run_dir.exports)) == left


def test_usage_says_what_takes_how_much_and_nothing_of_what_is_not_there(run_dir: RunDir) -> None:
    save(run_dir, 2, 4)
    export(run_dir, 4)
    (run_dir.path / "metrics.jsonl").write_bytes(b"m" * BYTES)
    (run_dir.source_dir / "hpc_grpo").mkdir(parents=True)
    parts = usage(run_dir)
    assert [(part.name, part.note) for part in parts[:1]] == [("checkpoints", "steps 2, 4")]
    assert {part.name for part in parts} == {"checkpoints", "exports", "records", "copy of hpc-grpo"}
    by_name = {part.name: part.num_bytes for part in parts}
    assert by_name["checkpoints"] >= 2 * BYTES
    assert by_name["exports"] >= BYTES
    assert sum(part.num_files for part in parts) == 1 + len(list(run_dir.path.rglob("*")))


def test_a_folder_that_cannot_be_read_is_an_error_and_not_a_smaller_sum(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run_dir, 2)
    listed = os.scandir

    def scandir(path: Any) -> Any:
        if str(path) == str(run_dir.checkpoint(2)):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ConfigError, match=r"2 cannot be read \(Permission denied\).*du -sh"):
        usage(run_dir)


def test_what_vanishes_while_it_is_counted_counts_nothing(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run_dir, 2)
    whole = taken_on_disk(run_dir.path)
    listed = os.scandir

    def scandir(path: Any) -> Any:
        if str(path) == str(run_dir.checkpoints):
            shutil.rmtree(path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    left = taken_on_disk(run_dir.path)
    assert 0 < left.num_bytes < whole.num_bytes
    assert 0 < left.num_files < whole.num_files
