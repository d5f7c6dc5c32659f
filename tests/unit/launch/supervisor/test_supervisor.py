"""What becomes of an attempt: real drivers, on nodes that only say what happens to them."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import EndAskedError
from hpc_grpo.launch.agent import watch
from hpc_grpo.launch.agent.protocol import Order
from hpc_grpo.launch.supervisor import supervisor as supervisor_module
from hpc_grpo.launch.supervisor import transitions
from hpc_grpo.launch.supervisor.attempt_setup import AttemptSetup
from hpc_grpo.launch.supervisor.supervisor import Supervisor
from hpc_grpo.launch.supervisor.transitions import Loss
from hpc_grpo.run.attempt import AttemptRecord, read_attempts
from hpc_grpo.run.evals import EvalRequest
from hpc_grpo.run.paths import RunDir
from tests.support.full_disk import full_once
from tests.support.places import FakePlace, FakeQueue, allocation

A_BUG = "raise RuntimeError('a bug that every start meets')"
CHECKPOINTS_WHEN_TOLD = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    "print('ready', flush=True); time.sleep(60)"
)


class FakeNodes:
    """Nodes in Ray, or still coming up while not `is_ready`; in `gone` are those that are lost from then on."""

    def __init__(self, *names: str, is_ready: bool, gone: tuple[str, ...] = ()) -> None:
        self.names, self.is_ready, self._gone = names, is_ready, gone
        self.ray_address, self.num_gpus, self.phases_s = "10.0.0.1:6379", 0, {"ray": 0.0}
        self.ray_dashboard = ""
        self.done: list[str] = []
        self.late: list[str] = []
        self.told_by_now: tuple[str, ...] = ()

    def start(self) -> None:
        self.done.append("start")

    def sources(self) -> list[int]:
        return []

    def advance(self) -> None: ...

    def bring_up_error(self) -> None:
        return None

    def publish_ray(self) -> None:
        self.done.append("publish_ray")

    def lost(self) -> dict[str, Loss]:
        return {node: Loss("Ray ended by itself") for node in self._gone}

    def take_late(self) -> list[str]:
        taken, self.late = self.late, []
        return taken

    def order(self, order: Order) -> None:
        self.done.append(order.name)

    def told(self) -> list[str]:
        return list(self.told_by_now)

    def tear_down(self, _deadline_s: float) -> list[str]:
        self.done.append("tear_down")
        return []

    def answering(self) -> list[str]:
        return [node for node in self.names if node not in self._gone]

    def anew(self, _goes_on: object) -> FakeNodes | None:
        left = self.answering()
        return FakeNodes(*left, is_ready=True) if left[:1] == list(self.names[:1]) else None

    def head_environment(self) -> dict[str, str]:
        return {}

    def inside(self, _program: str, _suffix: str = "") -> None:
        return None


class Scene:
    """One attempt in `run`, with a program for each start of its driver."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder / "run")
        self._begun = folder / "begun"
        self._begun.touch()
        self.supervisor: Supervisor

    def see_through(
        self,
        nodes: FakeNodes,
        *programs: str,
        chore: Callable[[], None] = lambda: None,
        queue: FakeQueue | None = None,
    ) -> AttemptRecord:
        place = FakePlace(allocation(*nodes.names), queue=queue or FakeQueue())
        place.is_attended = len(programs) == 1
        setup = AttemptSetup(self.run, LaunchConfig(), place, place.allocation(), 1, self._begun.parent)
        program = (
            f"from pathlib import Path\nbegun = Path({str(self._begun)!r})\nn = len(begun.read_text())\n"
            f"begun.write_text('x' * (n + 1))\nexec({programs!r}[n])"
        )
        self.supervisor = supervisor = Supervisor(setup, nodes, [sys.executable, "-c", program])
        supervisor.chore = lambda work: chore()
        setup.dir.mkdir(parents=True)
        with supervisor._signals:
            supervisor._processes.start()
            supervisor._see_it_through()
        supervisor._processes._close_driver()
        return supervisor.record

    @property
    def printed(self) -> str:
        (log,) = self.run.attempts.glob("*/driver.log")
        return log.read_text()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_the_record_says_what_the_driver_died_of(scene: Scene) -> None:
    record = scene.see_through(FakeNodes("n1", is_ready=False), A_BUG, A_BUG)
    why = "The driver crashed with exit code 1: RuntimeError: a bug that every start meets; see driver.log."
    assert (record.exit_kind, record.why, record.restarts) == ("crash", why, [why])


def test_what_an_earlier_start_died_of_is_not_said_of_the_last(scene: Scene) -> None:
    record = scene.see_through(FakeNodes("n1", is_ready=False), A_BUG, "raise SystemExit(3)")
    assert "a bug" in record.restarts[0]
    assert record.why == "The driver crashed with exit code 3; see driver.log."


def test_a_configuration_that_is_rejected_is_said_in_its_own_words(scene: Scene) -> None:
    rejects = "print('error: model.path = m is\\n  no model.'); raise SystemExit(78)"
    record = scene.see_through(FakeNodes("n1", is_ready=False), rejects)
    assert record.exit_kind == "config"
    assert record.why == "Something must be changed first: model.path = m is no model; see driver.log."
    (log,) = scene.run.attempts.glob("*/driver.log")
    printed_below_it = scene.supervisor._why_without_what_was_printed()
    assert printed_below_it == f"Something must be changed first; see {log}."


def test_after_a_lost_node_the_driver_is_started_again_on_those_that_answer(scene: Scene) -> None:
    nodes = FakeNodes("n1", "n2", is_ready=True, gone=("n2",))
    record = scene.see_through(nodes, "raise SystemExit(1)", "raise SystemExit(75)")
    assert record.exit_kind == "resumable"
    assert record.restarts == ["Lost 1 node(s) while training. n2: Ray ended by itself"]
    assert record.lost_nodes == {"n2": "Ray ended by itself"}
    assert nodes.done == ["start", "publish_ray", "tear_down"]
    assert scene.supervisor._processes.nodes.names == ("n1",)


def test_without_the_head_the_attempt_ends_and_names_the_node(scene: Scene) -> None:
    nodes = FakeNodes("n1", "n2", is_ready=True, gone=("n1",))
    record = scene.see_through(nodes, "raise SystemExit(1)", A_BUG)
    assert (record.exit_kind, record.exit_code, list(record.lost_nodes)) == ("node_lost", 1, ["n1"])
    assert record.restarts == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_driver_and_the_record_keeps_it(scene: Scene, number: int) -> None:
    sent: list[int] = []

    def end_once() -> None:
        if not sent and "ready" in scene.printed:
            sent.append(number)
            signal.raise_signal(number)

    record = scene.see_through(FakeNodes("n1", is_ready=True), CHECKPOINTS_WHEN_TOLD, chore=end_once)
    assert (record.exit_kind, record.signalled) == ("resumable", signal.Signals(number).name)
    assert record.signalled_at is not None
    assert record.signalled_at <= time.time()


def test_a_full_disk_at_the_start_pauses_the_attempt(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = full_once(monkeypatch, "driver.log")
    record = scene.see_through(FakeNodes("n1", is_ready=True), "raise SystemExit(75)")
    assert (record.exit_kind, len(refused)) == ("resumable", 1)


@pytest.mark.parametrize("is_signal", [True, False], ids=["SIGTERM", "STOP"])
def test_an_attempt_that_waits_for_space_can_be_ended(
    scene: Scene, is_signal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one with STOP is an eval, which has no attempts to count."""
    opened = Path.open
    if not is_signal:
        scene.run.path.mkdir()
        EvalRequest({"m": "m"}).save(scene.run)

    def full(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name != "driver.log":
            return opened(path, *args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM) if is_signal else scene.run.stop_marker.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(supervisor_module, "adopt_orphans", lambda: None)
    monkeypatch.setattr(supervisor_module, "descendants", lambda _pid: [])
    place = FakePlace(allocation("n1"))
    setup = AttemptSetup(scene.run, LaunchConfig(), place, place.allocation(), 1, scene.run.path.parent)
    with pytest.raises(EndAskedError, match="the disk is full"):
        Supervisor(setup, FakeNodes("n1", is_ready=True), ["true"]).run()
    assert read_attempts(scene.run)[0].exit_kind == "cancelled"
    assert capsys.readouterr().out.startswith(
        "Attempt 1 of run run on 1 node\n" if is_signal else "Engines on 1 node\n"
    )


@pytest.mark.parametrize("is_eval", [True, False])
def test_only_a_run_of_training_is_said_to_be_complete(
    scene: Scene, is_eval: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.run.path.mkdir()
    scene.run.complete_marker.touch()
    if is_eval:
        EvalRequest({"m": "m"}).save(scene.run)
    monkeypatch.setattr(supervisor_module, "adopt_orphans", lambda: None)
    monkeypatch.setattr(supervisor_module, "descendants", lambda _pid: [])
    place = FakePlace(allocation("n1"))
    setup = AttemptSetup(scene.run, LaunchConfig(), place, place.allocation(), 1, scene.run.path.parent)
    assert Supervisor(setup, FakeNodes("n1", is_ready=True), ["true"]).run() == 0
    assert ("The run is complete." in capsys.readouterr().out) == (not is_eval)


def test_a_driver_without_progress_and_its_nodes_are_asked_for_stacks(scene: Scene) -> None:
    nodes = FakeNodes("n1", is_ready=True)
    hangs = (
        "import signal, sys, time\n"
        "from hpc_grpo.run.pulse import PULSE, Patience\n"
        "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))\n"
        "PULSE.open('driver', Patience(0.1, 0.1, frozenset()))\n"
        "with PULSE.working('train'): time.sleep(60)"
    )
    record = scene.see_through(nodes, hangs)
    assert record.exit_kind == "resumable"
    assert re.match(r"The driver \(process \d+\) made no progress in 'train' for \d+ s", record.stuck)
    assert "STACKS" in nodes.done


def test_a_driver_that_is_stopped_is_ended_and_started_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "STOPPED_S", 0.5)
    monkeypatch.setattr(transitions, "_STACKS_S", 0.1)
    monkeypatch.setattr(transitions, "_SETTLE_S", 0.1)
    stops = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP); raise SystemExit(3)"
    record = scene.see_through(FakeNodes("n1", is_ready=True), stops, "raise SystemExit(75)")
    assert record.exit_kind == "resumable"
    (why,) = record.restarts
    assert re.match(r"The driver \(process \d+\) was stopped for \d+ s", why)


def test_what_agents_have_ended_is_recorded_and_explains_the_crash(scene: Scene) -> None:
    nodes = FakeNodes("n1", is_ready=True)
    nodes.late.append("On n1: The learner (process 7) was stopped.")
    record = scene.see_through(nodes, "import time; time.sleep(0.5); raise SystemExit(1)", "raise SystemExit(75)")
    assert record.late == ["On n1: The learner (process 7) was stopped."]
    assert record.restarts[0].startswith("On n1: The learner (process 7) was stopped.")


@pytest.mark.parametrize(
    ("until_s", "why"),
    [
        (None, "A signal told the nodes of this attempt to end. Stopped in time: the next job resumes the run."),
        (100.0, "The queue preempts this job, "),
    ],
)
def test_a_job_that_is_preempted_is_saved_on_nodes_that_stay(scene: Scene, until_s: float | None, why: str) -> None:
    nodes = FakeNodes("n1", "n2", is_ready=True)

    def preempt() -> None:
        if "ready" in scene.printed:
            nodes.told_by_now = ("n2",)

    queue = FakeQueue(preempted={"17": time.time() + until_s} if until_s else {})
    record = scene.see_through(nodes, CHECKPOINTS_WHEN_TOLD, chore=preempt, queue=queue)
    assert (record.exit_kind, record.exit_code, record.signalled) == ("resumable", 75, "")
    assert record.why.startswith(why)
    assert "LET_GO" not in nodes.done


def test_of_a_job_that_is_cancelled_the_nodes_go_at_once(scene: Scene) -> None:
    nodes = FakeNodes("n1", is_ready=True)

    def cancel() -> None:
        if "ready" in scene.printed and not nodes.told_by_now:
            nodes.told_by_now = ("n1",)
            signal.raise_signal(signal.SIGTERM)

    record = scene.see_through(nodes, CHECKPOINTS_WHEN_TOLD, chore=cancel)
    assert record.signalled == "SIGTERM"
    assert nodes.done[2:] == ["LET_GO"]
