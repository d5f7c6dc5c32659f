"""A folder that all agents of a user on a node share: who fills it, who waits, and that it goes with the last."""

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


def never() -> bool:
    pytest.fail("It waited for nobody.")


def test_agents_share_a_folder_and_the_last_one_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "hg-0-abc"
    first = shared_dir(path, filling, never)
    second = shared_dir(path, lambda _: pytest.fail("It is filled."), never)
    assert first is not None
    assert second is not None
    assert sweep(tmp_path) == []
    first.leave()
    assert (path / "content").read_text() == "whole"
    second.leave()
    assert list(tmp_path.iterdir()) == []


def test_an_agent_waits_for_one_that_fills_and_fills_where_that_was_ended(tmp_path: Path) -> None:
    path, turns = tmp_path / "hg-0-abc", []

    def goes_on() -> bool:
        turns.append(None)
        return len(turns) < 3

    def waits_for_another(folder: Path) -> bool:
        (folder / "half").touch()
        assert shared_dir(path, filling, goes_on) is None
        return False

    assert shared_dir(path, waits_for_another, lambda: False) is None
    assert len(turns) == 3
    assert not path.exists()
    folder = shared_dir(path, filling, never)
    assert folder is not None
    assert not (path / "half").exists()
    folder.leave()


def test_the_shared_folder_of_killed_agents_is_swept_and_a_half_filled_one_filled_anew(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from hpc_grpo.launch.agent.folders import shared_dir\n"
        "def fill(folder):\n    (folder / 'half').touch()\n    os.kill(os.getpid(), 9)\n"
        "shared_dir(Path(sys.argv[1]), fill, lambda: True)"
    )
    path = tmp_path / "hg-0-abc"
    subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert (path / "half").exists()
    folder = shared_dir(path, filling, never)
    assert folder is not None
    assert sorted(entry.name for entry in path.iterdir()) == [".agent", ".filled", "content"]
    folder.close()
    assert sweep(tmp_path) == [path]
    assert list(tmp_path.iterdir()) == []


def test_a_shared_folder_that_cannot_be_filled_is_not_left(tmp_path: Path) -> None:
    def fill(folder: Path) -> bool:
        (folder / "half").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        shared_dir(tmp_path / "hg-0-abc", fill, never)
    assert list(tmp_path.iterdir()) == []


def test_agents_that_come_and_go_at_once_all_find_the_folder_whole(tmp_path: Path) -> None:
    """Each process takes part and leaves a hundred times; nobody is refused, and nothing is left."""
    program = (
        "import sys, time; from pathlib import Path; from hpc_grpo.launch.agent.folders import shared_dir\n"
        "def fill(folder):\n    (folder / 'content').write_text('whole')\n    return True\n"
        "def goes_on():\n    time.sleep(0.001)\n    return True\n"
        "for _ in range(100):\n    folder = shared_dir(Path(sys.argv[1]), fill, goes_on)\n"
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
        shared_dir(path, filling, never)
    assert list(path.iterdir()) == []
