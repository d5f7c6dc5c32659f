"""Programs in a container, with an engine that behaves as docker does: its containers are not the client's children."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hpc_grpo.launch.agent.program import Inside, Program, RayProcess
from hpc_grpo.launch.agent.ray_command import STARTED_LINE
from hpc_grpo.launch.place.container import Container, labels_of
from hpc_grpo.system.process_tree import descendants
from hpc_grpo.system.processes import start_time
from tests.support.processes import gone, wait_until

ENGINE = """#!/bin/bash
case $1 in
run)
    while [ "$1" != image ]; do shift; done; shift
    setsid "$@" </dev/null & echo $! >> {made}
    trap 'kill -TERM $!' TERM
    wait $!; code=$?
    while kill -0 $! 2>/dev/null; do wait $!; code=$?; done
    exit $code ;;
ps) cat {made} ;;
rm) shift 2; for pid; do kill -9 -- -$pid 2>/dev/null; done; true ;;
esac
"""


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    engine, made = tmp_path / "bin" / "docker", tmp_path / "made"
    engine.parent.mkdir()
    engine.write_text(ENGINE.format(made=made))
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{engine.parent}:{os.environ['PATH']}")
    yield Inside(Container("image", "docker", sys.executable), labels_of("tag", "ray"), tmp_path / "ray-pid")
    for pid in map(int, made.read_text().split()):
        wait_until(lambda pid=pid: gone(pid), "no container is left")


def start(inside: Inside | None, program: str) -> Program:
    started = Program([sys.executable, "-c", program], dict(os.environ), inside)
    if inside:
        wait_until(lambda: started.pid != started.process.pid, "it runs in its container")
    return started


def test_its_id_is_that_of_the_program_and_it_ends_with_its_code(inside: Inside) -> None:
    program = start(inside, "import signal, sys; signal.signal(10, lambda *_: sys.exit(75)); signal.pause()")
    wait_until(lambda: "-c" in Path(f"/proc/{program.pid}/cmdline").read_text(), "it has begun")
    wait_until(lambda: b"0000000000000200" in Path(f"/proc/{program.pid}/status").read_bytes(), "it handles the signal")
    program.send(signal.SIGUSR1)
    wait_until(lambda: program.poll() is not None, "it has ended")
    assert program.poll() == 75
    program.end(1.0)


def test_a_kill_reaches_the_program_itself_and_is_told_as_such(inside: Inside) -> None:
    program = start(inside, "import time; time.sleep(100)")
    program.send(signal.SIGKILL)
    wait_until(lambda: program.poll() is not None, "it has ended")
    assert program.poll() == -signal.SIGKILL
    program.end(1.0)


def test_a_program_that_outlives_its_client_is_ended(inside: Inside) -> None:
    program = start(inside, "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(100)")
    pid = program.pid
    program.process.kill()
    wait_until(lambda: program.poll() is not None, "the client is gone")
    assert start_time(pid)
    program.end(0.1)
    assert gone(pid)


def test_without_a_container_it_is_the_process_itself() -> None:
    program = start(None, "import time; time.sleep(100)")
    assert program.pid == program.process.pid
    program.end(5.0)
    assert program.poll() == -signal.SIGTERM


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
