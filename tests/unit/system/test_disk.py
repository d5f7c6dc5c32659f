"""Room below a folder: quotas as sites' programs print them, and the tightest of all limits."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.system import disk
from hpc_grpo.system.commands import Answer
from hpc_grpo.system.disk import Quota, parse_quotas, room_in

KIB = 1024

LFS_WRAPPED = """\
Disk quotas for prj 12345 (pid 12345):
     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
/lus/lfs1aip2/scratch/u1234/alice
                4096000000* 4294967296 5368709120  6d23h  812345  0 10000000       -
"""
LFS_UNCERTAIN = """\
     Filesystem    used   quota   limit   grace   files   quota   limit   grace
       /scratch [1048576] 2097152 3145728       -  [1201]       0       0       -
Some errors happened when getting quota info. Some devices may be not working or deactivated. [] is inaccurate.
"""
LFS_UNLIMITED = "       /scratch 1048576       0       0       -    1201       0       0       -\n"
QUOTA = """\
Disk quotas for user alice (uid 1234):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
nfs1:/export/home 81234567  104857600 104857600           120000       0       0
/dev/mapper/vg-work  500*   400   600  6days     10     0     0
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LFS_WRAPPED, Quota("/lus/lfs1aip2/scratch/u1234/alice", 4096000000 * KIB, 5368709120 * KIB, 812345, 10000000)),
        (LFS_UNCERTAIN, Quota("/scratch", 1048576 * KIB, 3145728 * KIB, 1201)),
        (LFS_UNLIMITED, None),
        ("", None),
        ("Permission denied.\n", None),
        ("Unexpected quotactl error: Operation not supported\n", None),
    ],
)
def test_a_lustre_quota_is_read_and_its_hard_limit_taken(text: str, expected: Quota | None) -> None:
    assert next(parse_quotas(text), None) == expected


def test_the_quotas_of_other_file_systems_are_read_where_there_is_no_grace_and_where_there_is() -> None:
    assert [*parse_quotas(QUOTA)] == [
        Quota("nfs1:/export/home", 81234567 * KIB, 104857600 * KIB, 120000),
        Quota("/dev/mapper/vg-work", 500 * KIB, 600 * KIB, 10),
    ]
    assert not [*parse_quotas("Disk quotas for user alice (uid 1234): none\n")]


class Site:
    """Answers `lfs` and `quota` with texts by their first words; what it does not know is not installed."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str], deadline_s: float) -> Answer:
        self.asked.append(" ".join(argv))
        for words, text in self.answers.items():
            if " ".join(argv).startswith(words.replace("_", " ")):
                return Answer(text)
        return Answer(error="no such program", is_absent=True)


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that seems to be on Lustre."""
    monkeypatch.setattr(disk, "read_mounts", lambda: f"a@o2ib:/lfs {tmp_path} lustre rw 0 0\n")
    return tmp_path


def test_the_tightest_of_the_quotas_of_user_group_and_project_counts(mounted: Path) -> None:
    project = f"{mounted} 600 0 1000 - 1 0 0 -"
    site = Site(lfs_project="7 P /x", **{"lfs_quota_-q_-p_7": project, "lfs_quota": f"{mounted} 0 0 0 - 1 0 0 -"})
    room = room_in(mounted / "not" / "there", site)
    assert (room.num_bytes, room.limit) == (400 * KIB, "left of the project quota")
    assert [words.split()[3] for words in site.asked if words.startswith("lfs quota")] == ["-u", "-g", "-p"]


def test_a_quota_that_is_used_up_leaves_nothing(mounted: Path) -> None:
    site = Site(lfs_project="0 - /x", lfs_quota=f"{mounted} 2000* 900 1000 - 1 0 0 -")
    assert room_in(mounted, site).num_bytes == 0


def test_the_tightest_quota_of_files_counts_beside_that_of_bytes(mounted: Path) -> None:
    user, group = f"{mounted} 600 0 1000 - 90 100 200 -", f"{mounted} 100 0 1000 - 30 0 100 -"
    site = Site(lfs_project="0 - /x", **{"lfs_quota_-q_-u": user, "lfs_quota_-q_-g": group})
    room = room_in(mounted, site)
    assert (room.num_bytes, room.limit) == (400 * KIB, "left of the user quota")
    assert (room.num_files, room.files_limit) == (70, "left of the group quota")


def test_a_quota_of_files_alone_counts_too(mounted: Path) -> None:
    site = Site(lfs_project="0 - /x", lfs_quota=f"{mounted} 600 0 0 - 99 100 100 -")
    room = room_in(mounted, site)
    assert (room.limit, room.num_files) == ("free", 1)


def test_without_programs_that_tell_quotas_the_file_system_is_believed(mounted: Path) -> None:
    site = Site()
    assert room_in(mounted, site).limit == "free"
    assert len(site.asked) == 1


def test_a_quota_of_another_file_system_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "read_mounts", lambda: f"nfs1:/export/home {tmp_path} nfs4 rw 0 0\n")
    assert room_in(tmp_path, Site(quota="nfs1:/export/other 1 0 2\n")).limit == "free"
    assert room_in(tmp_path, Site(quota="nfs1:/export/home 1 0 2\n")).num_bytes == KIB


def test_a_file_system_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(_: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(disk.os, "statvfs", stale)
    with pytest.raises(ConfigError, match=r"does not report free space \(Stale file handle\)"):
        room_in(tmp_path, Site())
