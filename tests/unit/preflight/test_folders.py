"""The file system below a folder, and the folder of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.preflight.folders import file_system, judged_run_folder, run_folder_finding


def test_the_file_system_is_that_of_the_nearest_mount() -> None:
    mounts = "/dev/a / ext4 rw 0 0\nb /scratch lustre rw 0 0\nc /scratch/my\\040disk tmpfs rw 0 0\n"
    assert file_system(Path("/scratch/runs"), mounts) == "lustre"
    assert file_system(Path("/scratch/my disk/x"), mounts) == "tmpfs"
    assert file_system(Path("/scratchy"), mounts) == "ext4"
    assert file_system(Path("/"), "") == "unknown"


@pytest.mark.parametrize(
    ("kind", "free", "status"),
    [("lustre", 900.0, "ok"), ("ext4", 900.0, "ok"), ("tmpfs", 900.0, "warning"), ("lustre", 3.0, "warning")],
)
def test_the_run_folder_is_on_a_disk_that_nodes_share(kind: str, free: float, status: str) -> None:
    found = judged_run_folder(Path("/s/runs"), kind, free)
    assert (found.status, bool(found.fix)) == (status, status != "ok")
    assert kind in found.says


def test_a_run_folder_that_cannot_be_made_is_found_and_nothing_is_left(tmp_path: Path) -> None:
    assert run_folder_finding(tmp_path / "a" / "runs").status != "failure"
    assert list(tmp_path.iterdir()) == []
    found = run_folder_finding(Path("/proc/here/runs"))  # nobody, root included, can write there
    assert found.status == "failure"
    assert "run.root" in found.fix
