"""Only whole checkpoints are found, the newest first, and only older ones are pruned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_grpo.run.checkpoint import (
    Manifest,
    hash_files,
    newest_valid_checkpoint,
    prune_checkpoints,
    valid_checkpoints,
    write_manifest,
)
from hpc_grpo.run.paths import RunDir


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
    newest = newest_valid_checkpoint(run_dir)
    assert newest is not None
    assert newest.driver_state == {"step": 100}


def test_a_checkpoint_that_is_cut_or_changed_or_unreadable_is_passed_over(run_dir: RunDir) -> None:
    for step in range(1, 8):
        make_checkpoint(run_dir, step)
    (run_dir.checkpoint(7) / "manifest.json").unlink()
    (run_dir.checkpoint(6) / "manifest.json").write_text('{"policy_version": 6, "files"')
    (run_dir.checkpoint(5) / "rng_rank_0.pt").unlink()
    (run_dir.checkpoint(4) / "rng_rank_0.pt").write_bytes(b"stat")
    (run_dir.checkpoint(3) / "rng_rank_0.pt").write_bytes(b"State")
    (run_dir.checkpoint(2) / "manifest.json").write_text('["not a manifest"]')
    assert steps(run_dir) == [1]
    assert [c.step for c in valid_checkpoints(run_dir, check_hashes=False)] == [3, 1]


def test_a_run_without_checkpoints_has_none_to_resume_from_or_to_prune(run_dir: RunDir) -> None:
    assert newest_valid_checkpoint(run_dir) is None
    assert prune_checkpoints(run_dir, 2) == []


def test_pruning_counts_valid_checkpoints_only(run_dir: RunDir) -> None:
    for step in (1, 2, 3, 4, 5):
        make_checkpoint(run_dir, step)
    (run_dir.checkpoint(4) / "manifest.json").unlink()
    assert prune_checkpoints(run_dir, keep_last=2) == [1, 2]
    assert steps(run_dir) == [5, 3]
    assert run_dir.checkpoint(4).exists()
    assert prune_checkpoints(run_dir, keep_last=3) == []


def test_finding_checkpoints_loads_no_torch() -> None:
    code = "import sys, hpc_grpo.run.checkpoint; assert not {'torch', 'deepspeed', 'xxhash'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
