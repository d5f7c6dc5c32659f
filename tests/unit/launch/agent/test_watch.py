from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_grpo.launch.agent import watch as module
from hpc_grpo.launch.agent.watch import Watch, Watched, watched_on_node
from hpc_grpo.run.pulse import PULSES_NAME, Beat
from hpc_grpo.system.processes import hold_on, start_time


class Scene:
    """A watch that looks every five seconds, at processes whose pulses the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.hold = ""
        self.watch = Watch(lambda: self.now)
        self.said = ""
        monkeypatch.setattr(module, "hold_on", lambda _pid: self.hold)

    def late_after(self, *processes: Watched, at_most_s: float = 7200.0) -> tuple[float, list[str]]:
        """When it finds somebody late, and whom; looked at as often as in life."""
        begun = self.now
        while self.now - begun <= at_most_s:
            if late := self.watch.late(processes):
                self.said = late[0].why
                return self.now - begun, [one.process.name for one in late]
            self.now += 5.0
        return self.now - begun, []


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def process(name: str = "engine", pid: int = 7, count: int = 1, limit_s: float = 60.0) -> Watched:
    return Watched(name, pid, 1, Beat(count, limit_s, "sampling"))


def test_work_without_a_sign_is_late_past_its_limit_and_says_so(scene: Scene) -> None:
    after_s, late = scene.late_after(process())
    assert 60.0 < after_s <= 70.0
    assert late == ["engine"]
    assert scene.watch.late([process()]) == [], "it is told once"
    assert scene.said.startswith(
        "The engine (process 7) made no progress in 'sampling' for 65 s; it is late after 60 s"
    )


def test_signs_of_progress_keep_a_process_from_being_late(scene: Scene) -> None:
    for count in range(100):
        assert scene.watch.late([process(count=count)]) == []
        scene.now += 50.0


def test_who_waits_for_a_call_is_never_late(scene: Scene) -> None:
    assert scene.late_after(process(limit_s=float("inf")))[1] == []


def test_a_process_that_is_stopped_is_late_whatever_it_does(scene: Scene) -> None:
    scene.hold = "stopped"
    after_s, late = scene.late_after(process(limit_s=float("inf")))
    assert 30.0 < after_s <= 40.0
    assert late == ["engine"]


def test_a_process_that_is_stopped_is_named_at_once_where_somebody_has_crashed_for_want_of_it(scene: Scene) -> None:
    assert scene.watch.late([process("learner", 8), process()]) == []
    assert scene.watch.stopped() == []
    scene.hold = "stopped"
    for _ in range(2):
        scene.now += 5.0
        assert scene.watch.late([process()]) == []
    (late,) = scene.watch.stopped()
    assert late.why.startswith("The engine (process 7) was stopped in 'sampling' for 10 s")
    assert scene.watch.stopped() == [], "it is told once"


def test_a_process_in_a_debugger_is_not_late_and_begins_anew_when_let_go(scene: Scene) -> None:
    scene.hold = "traced"
    assert scene.late_after(process(), at_most_s=3600.0)[1] == []
    scene.hold = ""
    after_s, _ = scene.late_after(process())
    assert after_s > 50.0


@pytest.mark.parametrize("absence_s", [40.0, 100_000.0])
def test_time_in_which_the_watcher_was_away_makes_nobody_late(scene: Scene, absence_s: float) -> None:
    """A job that was suspended, a machine that slept, a watcher that hung in a write: all stand still together."""
    scene.hold = "stopped"
    assert scene.watch.late([process()]) == []
    scene.now += absence_s
    assert scene.watch.late([process()]) == []
    scene.hold = ""
    assert scene.late_after(process(count=2), at_most_s=50.0)[1] == []


def test_the_longest_silent_comes_first(scene: Scene) -> None:
    scene.watch.late([process("learner", 8)])
    scene.now += 5.0
    waiting, hung = process("engine", 7), process("learner", 8)
    assert scene.late_after(waiting, hung)[1] == ["learner"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_the_kernel_tells_a_process_that_is_stopped(sleeper: subprocess.Popen[bytes]) -> None:
    assert hold_on(sleeper.pid) == ""
    sleeper.send_signal(signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    assert hold_on(sleeper.pid) == "stopped"
    sleeper.send_signal(signal.SIGCONT)
    os.waitpid(sleeper.pid, os.WCONTINUED)
    assert hold_on(sleeper.pid) == ""


def test_on_a_node_actors_and_the_processes_of_ray_are_watched_and_nothing_below_them(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    folder = tmp_path / PULSES_NAME
    folder.mkdir()
    living, dead = folder / f"engine-{sleeper.pid}-{start_time(sleeper.pid)}", folder / f"engine-{sleeper.pid}-1"
    living.touch()
    dead.touch()
    nested = "import subprocess, sys; sys.argv[1:] and subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    ray = subprocess.Popen(
        [sys.executable, "-c", nested, nested, nested, nested, "print('up', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert ray.stdout is not None
        assert ray.stdout.readline() == b"up\n"
        watched = list(watched_on_node(tmp_path, ray.pid))
    finally:
        ray.communicate(b"\n")
    assert [one.name for one in watched] == ["engine"] + ["process of Ray"] * 3
    assert not dead.exists()


def test_the_process_by_which_enroot_holds_an_image_is_not_watched(tmp_path: Path) -> None:
    with subprocess.Popen(["fuse-shim"], executable="/bin/cat", stdin=subprocess.PIPE) as shim:
        assert list(watched_on_node(tmp_path, shim.pid)) == []


def test_a_signal_spares_a_later_process_of_the_same_id(sleeper: subprocess.Popen[bytes]) -> None:
    Watched("engine", sleeper.pid, 1).send(signal.SIGKILL)
    time.sleep(0.1)
    assert sleeper.poll() is None
    Watched("engine", sleeper.pid, start_time(sleeper.pid)).send(signal.SIGKILL)
    assert sleeper.wait(60) == -signal.SIGKILL
