"""Runs on pods: the same command on every pod, and what becomes of a run when something happens to one.

The rows marked `long` take a minute or more each; `make places` runs them and prints the table.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.places.conftest import residue_of, wait_until
from tests.places.scene import DEADLINE_S, NUM_STEPS, Command, Scene
from tests.support.outcomes import Outcome
from tools.virtual_machines.beds import Bed

pytestmark = pytest.mark.places

Record = Callable[[Outcome], None]
HEAD, WORKERS = "pod1", ("pod2", "pod3")
SLOWLY = {"HPC_GRPO_STAND_IN_STEP_S": "0.5"}
TWO_WILL_DO = {"min_nodes": 2, "rejoin_s": 20}
CUT_OFF_S = 20.0
DASHBOARD_PORT = 8265
ASK = """
import http.client, sys
host, port, token = sys.argv[1:]
for method, path in [("GET", "/nodes?view=summary"), ("GET", "/api/v0/actors"), ("POST", "/api/jobs/")]:
    there = http.client.HTTPConnection(host, int(port), timeout=20)
    try:
        there.request(method, path, "{}", {"Authorization": f"Bearer {token}"} if token else {})
        print(there.getresponse().status)
    except OSError as error:
        print(type(error).__name__)
"""


def pod_commands(scene: Scene, **environment: str) -> dict[str, Command]:
    """Type the command on all pods, the workers first: they wait for the head."""
    words = ("place", "pod", str(scene.config))
    commands = {name: scene.start_stepping(name, *words, **environment) for name in WORKERS}
    for worker in commands.values():
        worker.expect("Waiting for")
    return {**commands, HEAD: scene.start_stepping(HEAD, *words, **environment)}


def expect_complete(scene: Scene, record: Record, commands: dict[str, Command], *on: str) -> Outcome:
    """The commands of the pods `on` end with 0, and every step was done once in the lineage that counts."""
    for name in on or commands:
        assert commands[name].wait() == 0, commands[name].text
    outcome = scene.outcome()
    record(outcome)
    assert outcome.state == "complete", outcome
    assert scene.is_complete_to_the_end()
    return outcome


def expect_dashboard_behind_token(scene: Scene) -> None:
    """Ray's dashboard is at the head's loopback alone, where it shows nothing and takes no job without the token."""

    def ask(pod: str, host: str, token: str = "") -> list[str]:
        done = scene.bed.run(pod, [sys.executable, "-c", ASK, host, str(DASHBOARD_PORT), token], deadline_s=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert ask(HEAD, "127.0.0.1") == ["401"] * 3
    assert ask(HEAD, "127.0.0.1", "f" * 64) == ["403"] * 3
    assert ask(HEAD, "127.0.0.1", scene.run.secret.read_text())[0] == "200"
    assert ask("pod2", f"{HEAD}.runpod.internal") == ["ConnectionRefusedError"] * 3


def assert_nothing_left(bed: Bed) -> None:
    assert residue_of(bed) == {}


@pytest.mark.long
def test_three_pods_train_whose_workers_came_first(pods: Bed, record: Record) -> None:
    """Real training, with a learner and an engine on each pod."""
    with Scene(pods, "trained", train={"total_steps": 4}) as scene:
        words = ("place", "pod", str(scene.config))
        workers = {name: scene.start(name, *words) for name in WORKERS}
        for worker in workers.values():
            worker.expect("Waiting for")
        commands = {**workers, HEAD: scene.start(HEAD, *words)}
        expect_complete(scene, record, commands)
        (attempt,) = scene.attempts
        assert (sorted(attempt.nodes), attempt.num_gpus) == (sorted(pods.names), 12)
        assert "12 GPUs" in commands[HEAD].text
    assert_nothing_left(pods)


def test_a_worker_pod_that_is_killed_and_comes_back_rejoins(pods: Bed, record: Record) -> None:
    """With Ray's dashboard, which comes up again with Ray."""
    with Scene(pods, "back", launch={"ray_dashboard": True}) as scene:
        commands = pod_commands(scene, **SLOWLY)
        scene.wait_for_step(1)
        expect_dashboard_behind_token(scene)

        def blow() -> None:
            pods.kill("pod3")
            time.sleep(3.0)
            pods.start("pod3")
            commands["pod3"] = scene.start_stepping("pod3", "place", "pod", str(scene.config))

        scene.strike(blow)
        scene.await_recovery()
        expect_complete(scene, record, commands)
        attempt = scene.attempts[-1]
        assert (sorted(attempt.nodes), attempt.num_gpus) == (sorted(pods.names), 12)
        assert commands[HEAD].text.count(f"http://127.0.0.1:{DASHBOARD_PORT} on {HEAD}") == 2
    assert_nothing_left(pods)


@pytest.mark.long
def test_a_worker_pod_that_is_gone_is_done_without(pods: Bed, record: Record) -> None:
    with Scene(pods, "without", launch=TWO_WILL_DO) as scene:
        commands = pod_commands(scene, **SLOWLY)
        scene.strike(lambda: pods.kill("pod3", cut_network=True))
        try:
            scene.await_recovery()
            expect_complete(scene, record, commands, HEAD, "pod2")
        finally:
            pods.start("pod3")
        assert "pod3" in scene.attempts[-1].lost_nodes
    assert_nothing_left(pods)


@pytest.mark.long
def test_a_worker_pod_that_is_gone_and_needed_is_named(pods: Bed, record: Record) -> None:
    with Scene(pods, "named", launch={"rejoin_s": 5}) as scene:
        commands = pod_commands(scene, **SLOWLY)
        scene.strike(lambda: pods.kill("pod3"))
        try:
            assert commands[HEAD].wait() == 69, commands[HEAD].text
            assert "pod3" in commands[HEAD].text
            # The worker that is left waits for a head that may be started again.
            assert commands["pod2"].process.poll() is None
            commands["pod2"].ctrl_c()
            commands["pod2"].wait()
            outcome = scene.outcome()
            record(outcome)
            assert outcome.state != "complete"
        finally:
            pods.start("pod3")
    assert_nothing_left(pods)


@pytest.mark.long
def test_the_head_pod_killed_and_started_again_finds_its_workers(pods: Bed, record: Record) -> None:
    """Nobody does anything on the workers; the run goes on from the newest checkpoint."""
    with Scene(pods, "head") as scene:
        commands = pod_commands(scene, **SLOWLY)

        def blow() -> None:
            pods.kill(HEAD, cut_network=True)
            time.sleep(5.0)
            pods.start(HEAD)
            commands[HEAD] = scene.start_stepping(HEAD, "place", "pod", str(scene.config))

        scene.strike(blow)
        scene.await_recovery()
        outcome = expect_complete(scene, record, commands)
        assert outcome.num_attempts == 2
        assert scene.attempts[-1].first_step >= 4
        assert outcome.lost_steps <= 2
    assert_nothing_left(pods)


@pytest.mark.long
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_worker_cut_off(pods: Bed, record: Record, comes_back: bool) -> None:
    """For 20 s, or for good: the others suffice."""
    with Scene(pods, f"cut-{comes_back}", launch=TWO_WILL_DO) as scene:
        commands = pod_commands(scene, **SLOWLY)

        def blow() -> None:
            pods.unplug("pod3")
            if comes_back:
                time.sleep(CUT_OFF_S)
                pods.plug("pod3")

        scene.strike(blow)
        try:
            scene.await_recovery()
            expect_complete(scene, record, commands, HEAD, "pod2")
        finally:
            pods.plug("pod3")
        # Cut off it has ended what it had; plugged in, it dials a head that is no more, until it is told to end.
        wait_until(lambda: not _ray_of(pods, "pod3"), DEADLINE_S, "no Ray is left on pod3")
        if commands["pod3"].process.poll() is None:
            commands["pod3"].ctrl_c()
            commands["pod3"].wait()
    assert_nothing_left(pods)


@pytest.mark.long
def test_ctrl_c_at_the_head_keeps_a_checkpoint(pods: Bed, record: Record) -> None:
    with Scene(pods, "ctrl-c-head") as scene:
        commands = pod_commands(scene, **SLOWLY)
        scene.strike(commands[HEAD].ctrl_c)
        assert commands[HEAD].wait() == 75, commands[HEAD].text
        stopped_at = scene.step
        assert stopped_at < NUM_STEPS
        commands[HEAD] = scene.start_stepping(HEAD, "place", "pod", str(scene.config))
        # Workers that were told of the end are started again too; those that wait for a head join it.
        for name in WORKERS:
            if commands[name].process.poll() is not None:
                commands[name] = scene.start_stepping(name, "place", "pod", str(scene.config))
        outcome = expect_complete(scene, record, commands)
        assert (outcome.lost_steps, scene.attempts[-1].first_step) == (0, stopped_at)
    assert_nothing_left(pods)


@pytest.mark.long
def test_ctrl_c_while_ray_comes_up_again_ends_with_75_as_there_is_a_checkpoint(pods: Bed, record: Record) -> None:
    with Scene(pods, "ctrl-c-again") as scene:
        commands = pod_commands(scene, **SLOWLY)

        def blow() -> None:
            pods.kill("pod3")
            pods.start("pod3")
            commands["pod3"] = scene.start_stepping("pod3", "place", "pod", str(scene.config))

        scene.strike(blow)
        commands[HEAD].expect("Bringing Ray up again")
        commands[HEAD].ctrl_c()
        assert commands[HEAD].wait() == 75, commands[HEAD].text
        assert "Ray is not up yet (SIGINT); start the run again" in commands[HEAD].text
        commands[HEAD] = scene.start_stepping(HEAD, "place", "pod", str(scene.config))  # the workers wait for it
        expect_complete(scene, record, commands)
    assert_nothing_left(pods)


@pytest.mark.long
def test_ctrl_c_at_a_worker_names_the_loss(pods: Bed, record: Record) -> None:
    with Scene(pods, "ctrl-c-worker", launch=TWO_WILL_DO) as scene:
        commands = pod_commands(scene, **SLOWLY)
        scene.strike(commands["pod3"].ctrl_c)
        assert commands["pod3"].wait() == 75, commands["pod3"].text
        scene.await_recovery()
        expect_complete(scene, record, commands, HEAD, "pod2")
        assert "SIGINT" in str(scene.attempts[-1].lost_nodes["pod3"])
    assert_nothing_left(pods)


@pytest.mark.long
def test_a_supervisor_killed_at_the_head_leaves_nothing_on_any_pod(pods: Bed, record: Record) -> None:
    with Scene(pods, "headless") as scene:
        commands = pod_commands(scene, **SLOWLY)
        scene.strike(lambda: commands[HEAD].process.send_signal(signal.SIGKILL))
        wait_until(lambda: not any(_ray_of(pods, name) for name in pods.names), DEADLINE_S, "all Ray has ended")
        commands[HEAD] = scene.start_stepping(HEAD, "place", "pod", str(scene.config))
        scene.await_recovery()
        expect_complete(scene, record, commands)
    assert_nothing_left(pods)


def _ray_of(bed: Bed, name: str) -> list[Any]:
    return [words for words in bed.processes(name).values() if "/raylet" in words or "gcs_server" in words]
