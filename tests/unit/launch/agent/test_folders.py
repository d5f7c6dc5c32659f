"""A folder that all agents of a user on a node share: who fills it, and that it goes with the last."""

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
from hpc_grpo.launch.agent.folders import OwnedDir, copy_logs, keep_ray_logs, shared_dir, sweep


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
    with pytest.raises(LaunchError, match=rf"Run chmod \+t {tmp_path}, or have its owner run it"):
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


def filling(folder: Path) -> bool:
    (folder / "content").write_text("whole")
    return True


def test_agents_share_a_folder_and_the_last_one_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "hg-0-abc"
    first = shared_dir(path, filling)
    second = shared_dir(path, lambda _: pytest.fail("It is filled."))
    assert first is not None
    assert second is not None
    assert sweep(tmp_path) == []
    first.leave()
    assert (path / "content").read_text() == "whole"
    second.leave()
    assert list(tmp_path.iterdir()) == []


def test_of_two_agents_that_fill_at_once_both_use_the_folder_of_the_first(tmp_path: Path) -> None:
    path, others = tmp_path / "hg-0-abc", []

    def is_late(folder: Path) -> bool:
        (folder / "content").write_text("late")
        others.append(shared_dir(path, filling))
        return True

    folder = shared_dir(path, is_late)
    assert folder is not None
    assert (path / "content").read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]
    folder.leave()
    others[0].leave()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_lost_its_lock_is_filled_anew_unless_it_is_in_use(tmp_path: Path) -> None:
    """What cleans /tmp removes old files, and no folder that is locked."""
    path, filled = tmp_path / "hg-0-abc", []

    def fill(folder: Path) -> bool:
        filled.append(folder)
        assert len(filled) < 3, "It is filled again and again."
        return filling(folder)

    first = shared_dir(path, fill)
    assert first is not None
    (path / ".agent").unlink()
    with pytest.raises(LaunchError, match=r"is in use and lacks its file \.agent"):
        shared_dir(path, fill)
    first.close()
    again = shared_dir(path, fill)
    assert again is not None
    assert sorted(entry.name for entry in path.iterdir()) == [".agent", "content"]
    again.leave()
    assert list(tmp_path.iterdir()) == []


def test_a_fill_that_was_ended_leaves_nothing(tmp_path: Path) -> None:
    assert shared_dir(tmp_path / "hg-0-abc", lambda _: False) is None
    assert list(tmp_path.iterdir()) == []


def test_what_killed_agents_leave_is_swept_and_a_half_filled_folder_never_has_the_name(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from hpc_grpo.launch.agent.folders import shared_dir\n"
        "def fill(folder):\n    (folder / 'half').touch()\n    os.kill(os.getpid(), 9)\n"
        "shared_dir(Path(sys.argv[1]), fill)"
    )
    path = tmp_path / "hg-0-abc"
    subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    (half,) = tmp_path.glob("hg-*/half")
    folder = shared_dir(path, filling)
    assert folder is not None
    assert sorted(entry.name for entry in path.iterdir()) == [".agent", "content"]
    folder.close()
    assert sorted(sweep(tmp_path)) == sorted([half.parent, path])
    assert list(tmp_path.iterdir()) == []


def test_a_shared_folder_that_cannot_be_filled_is_not_left(tmp_path: Path) -> None:
    def fill(folder: Path) -> bool:
        (folder / "half").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        shared_dir(tmp_path / "hg-0-abc", fill)
    assert list(tmp_path.iterdir()) == []


def test_agents_that_come_and_go_at_once_all_find_the_folder_whole(tmp_path: Path) -> None:
    """Each process takes part and leaves a hundred times; nobody is refused, and nothing is left."""
    program = (
        "import sys; from pathlib import Path; from hpc_grpo.launch.agent.folders import shared_dir\n"
        "def fill(folder):\n    (folder / 'content').write_text('whole')\n    return True\n"
        "for _ in range(100):\n    folder = shared_dir(Path(sys.argv[1]), fill)\n"
        "    assert (folder.path / 'content').read_text() == 'whole'\n    folder.leave()\n"
    )
    agents = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "hg-0-abc")]) for _ in range(3)]
    assert [agent.wait(timeout=120) for agent in agents] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_name_that_another_user_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hg-0-abc"
    path.mkdir()
    os.chown(path, 12345, 12345)
    with pytest.raises(LaunchError, match=r"is another user's\. Set launch\.local_dir"):
        shared_dir(path, filling)
    assert list(path.iterdir()) == []
