"""Ray's process as its agent holds it, with a shell in the place of `ray start` and a sleep in that of the raylet."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hpc_grpo.launch.agent.program import RayProcess
from hpc_grpo.launch.agent.ray_command import STARTED_LINE
from hpc_grpo.system.process_tree import descendants
from tests.support.processes import gone, wait_until


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[RayProcess]:
    """`ray start` that goes on whatever becomes of its raylet, as Ray's does where that ends by SIGTERM."""
    raylet = tmp_path / "raylet"
    raylet.symlink_to(shutil.which("sleep") or "")
    script = f"{raylet} 60 & echo '{STARTED_LINE}'; wait; exec sleep 60"
    process = RayProcess(["bash", "-c", script], dict(os.environ), tmp_path / "ray_start.log")
    wait_until(process.is_up, "it is up")
    # The shell goes on to its echo while the forked child is still a shell.
    wait_until(lambda: _names(process) == ["raylet"], "the raylet runs")
    yield process
    for pid in descendants(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.terminate(lambda: 10.0)


def _names(ray: RayProcess) -> list[str]:
    names = []
    for pid in descendants(ray.pid):
        with suppress(psutil.NoSuchProcess):  # it has ended since
            names.append(psutil.Process(pid).name())
    return names


def test_ray_with_its_raylet_goes_on(ray: RayProcess) -> None:
    assert ray.why_ended() == ""


def test_ray_is_over_when_its_raylet_ends_though_ray_start_goes_on(ray: RayProcess) -> None:
    assert ray.why_ended() == ""
    os.kill(descendants(ray.pid)[0], signal.SIGTERM)
    wait_until(lambda: ray.why_ended() != "", "Ray is over")
    assert ray.why_ended() == "Ray's raylet ended by itself"
    assert ray.poll() is None


def test_ray_is_over_when_its_raylet_was_never_seen(ray: RayProcess) -> None:
    raylet = descendants(ray.pid)[0]
    os.kill(raylet, signal.SIGTERM)
    wait_until(lambda: gone(raylet), "the raylet is gone")
    assert ray.why_ended() == "Ray's raylet ended by itself"


def test_ray_is_over_with_ray_start_whose_exit_code_is_told(tmp_path: Path) -> None:
    process = RayProcess(["bash", "-c", "exit 3"], dict(os.environ), tmp_path / "ray_start.log")
    wait_until(lambda: process.poll() is not None, "it ended")
    assert process.why_ended() == "Ray ended by itself with exit code 3"
