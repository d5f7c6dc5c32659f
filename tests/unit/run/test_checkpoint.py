"""Only whole checkpoints are found, the newest first, and only older ones are pruned."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.checkpoint import (
    FileEntry,
    Manifest,
    find_checkpoint,
    hash_files,
    prune_checkpoints,
    set_aside,
    valid_checkpoints,
    write_manifest,
)
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import RunState, write_state


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def make_checkpoint(run_dir: RunDir, step: int) -> Path:
    path = run_dir.checkpoint(step)
    (path / "deepspeed").mkdir(parents=True)
    (path / "deepspeed" / "weights.pt").write_bytes(bytes(range(256)) * 10)
    (path / "rng_rank_0.pt").write_bytes(b"state")
    names = ["deepspeed/weights.pt", "rng_rank_0.pt"]
    write_manifest(path, Manifest(step, 1, 2, tuple(hash_files(path, names)), {"step": step}))
    return path


def steps(run_dir: RunDir) -> list[int]:
    return [checkpoint.step for checkpoint in valid_checkpoints(run_dir)]


def test_the_newest_checkpoint_comes_first_with_its_driver_state(run_dir: RunDir) -> None:
    for step in (5, 10, 100):
        make_checkpoint(run_dir, step)
    assert steps(run_dir) == [100, 10, 5]
    newest = next(valid_checkpoints(run_dir), None)
    assert newest is not None
    assert newest.manifest.driver_state == {"step": 100}


def test_a_checkpoint_that_is_cut_or_changed_or_unreadable_is_passed_over(run_dir: RunDir) -> None:
    for step in range(1, 8):
        (make_checkpoint(run_dir, step) / ".manifest.json.copy").unlink()
    (run_dir.checkpoint(7) / "manifest.json").unlink()
    (run_dir.checkpoint(6) / "manifest.json").write_text('{"policy_version": 6, "files"')
    (run_dir.checkpoint(5) / "rng_rank_0.pt").unlink()
    (run_dir.checkpoint(4) / "rng_rank_0.pt").write_bytes(b"stat")
    (run_dir.checkpoint(3) / "rng_rank_0.pt").write_bytes(b"State")
    (run_dir.checkpoint(2) / "manifest.json").write_text('["not a manifest"]')
    assert steps(run_dir) == [1]
    assert [c.step for c in valid_checkpoints(run_dir, check_hashes=False)] == [3, 1]


def test_an_empty_object_for_a_manifest_counts_as_no_manifest(run_dir: RunDir) -> None:
    """Its copy holds the digests of the files, and they are compared with those; without one nothing does."""
    for step in (1, 2, 3):
        (make_checkpoint(run_dir, step) / "manifest.json").write_text("{}")
    (run_dir.checkpoint(3) / ".manifest.json.copy").unlink()
    (run_dir.checkpoint(2) / "rng_rank_0.pt").write_bytes(b"State")
    found, damaged = find_checkpoint(run_dir)
    assert found is not None
    assert found.step == 1
    assert [str(checkpoint) for checkpoint in damaged] == [
        "step_3: manifest.json is cut short, changed or of another format",
        "step_2: rng_rank_0.pt is corrupt",
    ]


def test_a_run_without_checkpoints_has_none_to_resume_from_or_to_prune(run_dir: RunDir) -> None:
    assert next(valid_checkpoints(run_dir), None) is None
    assert prune_checkpoints(run_dir, 2) == []


def test_pruning_counts_valid_checkpoints_only(run_dir: RunDir) -> None:
    for step in (1, 2, 3, 4, 5):
        make_checkpoint(run_dir, step)
    for name in ("manifest.json", ".manifest.json.copy"):
        (run_dir.checkpoint(4) / name).unlink()
    assert prune_checkpoints(run_dir, keep_last=2) == [1, 2]
    assert steps(run_dir) == [5, 3]
    assert run_dir.checkpoint(4).exists()
    assert prune_checkpoints(run_dir, keep_last=3) == []


def test_finding_checkpoints_loads_no_torch() -> None:
    code = "import sys, hpc_grpo.run.checkpoint; assert not {'torch', 'deepspeed', 'xxhash'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def damage_all(run_dir: RunDir) -> None:
    for step in (1, 2):
        make_checkpoint(run_dir, step)
    (run_dir.checkpoint(2) / "rng_rank_0.pt").write_bytes(b"State")
    for name in ("manifest.json", ".manifest.json.copy"):
        (run_dir.checkpoint(1) / name).write_text('{"files": ["a list of names"]}')


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_keeps_them(run_dir: RunDir) -> None:
    damage_all(run_dir)
    before = sorted(run_dir.path.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        find_checkpoint(run_dir)
    assert "step_2: rng_rank_0.pt is corrupt" in str(caught.value)
    assert "step_1: manifest.json is cut short, changed or of another format" in str(caught.value)
    assert f"To start over from step 0: mv {run_dir.path} {run_dir.path}.before" in str(caught.value)
    assert sorted(run_dir.path.rglob("*")) == before


def test_a_run_whose_checkpoints_are_gone_is_refused_where_another_record_knows_of_them(run_dir: RunDir) -> None:
    assert find_checkpoint(run_dir) == (None, [])
    write_state(run_dir, RunState(1, 9, 1, "training", step_p95_s=2.0))
    assert find_checkpoint(run_dir) == (None, [])
    write_state(run_dir, RunState(2, 9, 1, "training", step_p95_s=2.0, save_p95_s=1.0))
    with pytest.raises(ConfigError, match="has written checkpoints"):
        find_checkpoint(run_dir)


def test_a_manifest_without_files_or_beside_others_does_not_pass(run_dir: RunDir) -> None:
    make_checkpoint(run_dir, 1)
    run_dir.checkpoint(9).mkdir()
    write_manifest(run_dir.checkpoint(9), Manifest(9, 1, 2, (), {"step": 9}))
    (make_checkpoint(run_dir, 8) / "deepspeed" / "more.pt").touch()
    linked = make_checkpoint(run_dir, 7) / "rng_rank_0.pt"
    linked.rename(run_dir.path / "elsewhere.pt")
    linked.symlink_to(run_dir.path / "elsewhere.pt")
    shutil.copytree(run_dir.checkpoint(1), run_dir.checkpoint(6))
    outside = (FileEntry("../step_1/rng_rank_0.pt", 5, "0"),)
    run_dir.checkpoint(5).mkdir()
    write_manifest(run_dir.checkpoint(5), Manifest(5, 1, 2, outside, {"step": 5}))
    found, damaged = find_checkpoint(run_dir, check_hashes=False)
    assert found is not None
    assert found.step == 1
    assert [str(checkpoint) for checkpoint in damaged] == [
        "step_9: its manifest lists no files",
        "step_8: deepspeed/more.pt is not in its manifest",
        "step_7: rng_rank_0.pt is a link",
        "step_6: its manifest is that of step 1",
        "step_5: ../step_1/rng_rank_0.pt lies outside of the checkpoint",
    ]
    assert set_aside(damaged[0]).name == "step_9.damaged"
    assert steps(run_dir) == [1]


def test_a_checkpoint_of_a_manifest_without_digest_is_resumed(run_dir: RunDir) -> None:
    path = make_checkpoint(run_dir, 4) / "manifest.json"
    values = json.loads(path.read_text())
    del values["digest"]
    path.write_text(json.dumps(values))
    path.with_name(".manifest.json.copy").unlink()
    assert steps(run_dir) == [4]
