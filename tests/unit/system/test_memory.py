from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_grpo.system.memory import Memory, freed_bytes, host_memory


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=4000, available=3000))


def cgroup(folder: Path, limit: str, files: tuple[str, str, str]) -> None:
    limit_name, usage_name, inactive_name = files
    folder.mkdir(parents=True)
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / usage_name).write_text("700\n")
    (folder / "memory.stat").write_text(f"anon 500\n{inactive_name} 150\n")


VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_of_a_jobs_limit_what_it_leaves_counts(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("0::/system.slice/job_7/step_0\n")
    cgroup(root / "system.slice/job_7", "1000", VERSION_2)
    cgroup(root / "system.slice/job_7/step_0", "max", VERSION_2)
    assert host_memory(own, root) == Memory(1000, 450)


def test_a_limit_of_version_1_counts_too(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("4:cpuset:/slurm/job_7\n3:memory:/slurm/job_7\n")
    cgroup(root / "memory/slurm/job_7", "1000", VERSION_1)
    assert host_memory(own, root) == Memory(1000, 450)


@pytest.mark.parametrize("content", [None, "0::/not/mounted/here\n", "1:cpuset:/\n"])
def test_without_a_limit_it_is_the_nodes_memory(content: str | None, tmp_path: Path) -> None:
    own = tmp_path / "own"
    if content is not None:
        own.write_text(content)
    assert host_memory(own, tmp_path / "cgroup") == Memory(4000, 3000)


def test_what_a_process_has_freed_since_its_peak_is_known() -> None:
    before = freed_bytes()
    taken = bytearray(200 << 20)
    taken[::4096] = b"\1" * len(range(0, len(taken), 4096))
    at_peak = freed_bytes()
    del taken
    assert freed_bytes() - at_peak > (150 << 20)
    assert at_peak <= max(before, 50 << 20)
