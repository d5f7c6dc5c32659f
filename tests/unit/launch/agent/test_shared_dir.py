"""A folder that all agents of a user on a node share: who fills it, and that it goes with the last."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.agent.folders import shared_dir, sweep


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
    with pytest.raises(LaunchError, match=r"is in use and has lost its file \.agent"):
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
