from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.agent import folders
from hpc_grpo.launch.agent.folders import OwnedDir, copy_logs, keep_ray_logs, sweep


def test_a_folder_is_private_and_survives_a_sweep_while_owned(tmp_path: Path) -> None:
    owned = OwnedDir(tmp_path / "hg-1-1-0")
    assert owned.path.stat().st_mode & 0o777 == 0o700
    assert sweep(tmp_path) == []
    owned.remove()
    assert not owned.path.exists()


def test_a_folder_whose_lock_does_not_fit_on_the_disk_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders.os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        OwnedDir(tmp_path / "hg-1-1-0")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_agent_is_swept(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from hpc_grpo.launch.agent.folders import OwnedDir\n"
        "owned = OwnedDir(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    left = tmp_path / "hg-1-1-0"
    subprocess.run([sys.executable, "-c", program, str(left)], check=False)
    assert left.exists()
    assert sweep(tmp_path) == [left]
    assert not left.exists()


@pytest.mark.parametrize(
    "ends",
    [
        "folder = OwnedDir(path); fill(path); shutil.rmtree = remove_one; folder.remove()",
        "folder = shared_dir(path, fill); shutil.rmtree = remove_one; folder.leave()",
    ],
    ids=["owned", "shared"],
)
def test_what_an_agent_leaves_that_is_killed_while_it_removes_is_swept(tmp_path: Path, ends: str) -> None:
    program = (
        "import os, shutil, sys; from pathlib import Path\n"
        "from hpc_grpo.launch.agent.folders import OwnedDir, shared_dir\n"
        "path, remove = Path(sys.argv[1]), shutil.rmtree\n"
        "def fill(folder):\n    [(folder / str(n)).mkdir() for n in range(20)]\n    return True\n"
        "def remove_one(path):\n    remove(path)\n    os.kill(os.getpid(), 9)\n"
        f"{ends}"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "hg-0-abc")], check=False)
    (left,) = tmp_path.iterdir()
    assert len(list(left.glob("[0-9]*"))) == 19
    assert sweep(tmp_path) == [left]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lock", [None, "another-host"])
def test_folders_that_may_be_somebody_elses_stay(tmp_path: Path, lock: str | None) -> None:
    other = tmp_path / "hg-other"
    other.mkdir()
    if lock is not None:
        (other / ".agent").write_text(lock)
    assert sweep(tmp_path) == []
    assert other.exists()


def leftover(parent: Path) -> Path:
    """The folder of an agent of this node that was killed."""
    folder = parent / "hg-1-1-0"
    folder.mkdir()
    (folder / ".agent").write_text(socket.gethostname())
    (folder / "buffer_0").touch()
    return folder


def test_of_two_agents_that_sweep_at_once_one_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = leftover(tmp_path)
    remove, swept_meanwhile = shutil.rmtree, []

    def rmtree(path: Path) -> None:
        if not swept_meanwhile:
            swept_meanwhile.append([])
            swept_meanwhile[0] = sweep(tmp_path)  # what the other agent finds while this one removes
        remove(path)

    monkeypatch.setattr(folders.shutil, "rmtree", rmtree)
    assert sweep(tmp_path) == [left]
    assert swept_meanwhile == [[]]
    assert not left.exists()


@pytest.mark.parametrize("when", ["folder", "lock", "flock"])
def test_a_folder_that_another_agent_removes_under_our_eyes_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    left = leftover(tmp_path)
    module, name = (folders.fcntl, "flock") if when == "flock" else (folders.os, "open")
    wrapped = getattr(module, name)
    remove = shutil.rmtree

    def late(what: Any, *arguments: Any, **options: Any) -> Any:
        if left.exists() and (when == "flock" or what == {"folder": left, "lock": ".agent"}[when]):
            monkeypatch.undo()
            remove(left)
        return wrapped(what, *arguments, **options)

    monkeypatch.setattr(module, name, late)
    assert sweep(tmp_path) == []


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_that_others_may_write_without_a_sticky_bit_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(LaunchError, match=rf"no sticky bit \(mode {mode:o}\).*launch\.local_dir"):
        OwnedDir(tmp_path / "hg-1-1-0")
    tmp_path.chmod(mode | 0o1000)
    OwnedDir(tmp_path / "hg-1-1-0").remove()


def test_shared_memory_without_a_sticky_bit_is_refused_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SHM", tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(LaunchError, match=rf"Have chmod \+t {tmp_path} done\.$"):
        OwnedDir(tmp_path / "hg-1-1-0")


def plant(parent: Path, what: str) -> Path:
    """What another user can make beside our folders, so that sweeping fails or removes the wrong thing."""
    path = parent / "hg-17-1-0"
    victim = parent / "victim"
    if what == "link":
        leftover(parent).rename(victim)
        path.symlink_to(victim)
    elif what == "file":
        path.write_text("no folder")
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
        lock = path / ".agent"
        if what == "lock is a link":
            leftover(parent / "deep").rename(victim)
            lock.symlink_to(victim / ".agent")
        elif what == "lock is a fifo":
            os.mkfifo(lock)
        elif what == "lock is a folder":
            lock.mkdir()
        else:
            lock.write_bytes(b"\xff\xfe")
    return path


@pytest.mark.parametrize(
    "what", ["link", "file", "fifo", "lock is a link", "lock is a fifo", "lock is a folder", "lock is no text"]
)
def test_what_another_user_planted_is_neither_swept_nor_followed(tmp_path: Path, what: str) -> None:
    (tmp_path / "deep").mkdir()
    planted = plant(tmp_path, what)
    assert sweep(tmp_path) == []
    assert os.path.lexists(planted)
    assert not what.endswith("link") or (tmp_path / "victim" / ".agent").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_another_users_folder_that_looks_like_a_leftover_stays(tmp_path: Path) -> None:
    left = leftover(tmp_path)
    os.chown(left, 65534, 65534)
    assert sweep(tmp_path) == []
    assert left.exists()


def test_a_leftover_that_cannot_be_removed_is_no_reason_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leftover(tmp_path)

    def busy(_path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(folders.shutil, "rmtree", busy)
    assert sweep(tmp_path) == []


def test_what_ray_start_says_in_an_attempt_is_kept_of_every_ray(tmp_path: Path) -> None:
    kept = tmp_path / "n1"
    kept.mkdir()
    for number in (1, 2):
        own = tmp_path / f"hg-17-0-{number}"
        (own / "r").mkdir(parents=True)
        (own / "ray_start.log").write_text(f"Ray {number}\n")
        keep_ray_logs(own / "r", kept)
    assert (kept / "ray_start.log").read_text() == "Ray 1\nRay 2\n"


def test_logs_are_copied_without_empty_ones_and_huge_ones_from_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_MAX_LOG_BYTES", 4)
    source = tmp_path / "logs"
    (source / "events").mkdir(parents=True)
    (source / "raylet.out").write_text("0123456789")
    (source / "events" / "e.log").write_text("ab")
    (source / "empty.err").touch()
    copy_logs(source, tmp_path / "copy")
    copied = {p.relative_to(tmp_path / "copy").as_posix(): p.read_text() for p in (tmp_path / "copy").rglob("*.*")}
    assert copied == {"raylet.out": "6789", "events/e.log": "ab"}
