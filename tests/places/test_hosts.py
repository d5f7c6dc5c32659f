"""Runs on hosts: by hand, one command on each, and over ssh from one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_grpo.run.checkpoint import newest_step
from tests.places.conftest import residue_of
from tests.places.scene import PROGRAMS, STEPPING, Command, Scene
from tests.support.outcomes import Outcome
from tools.virtual_machines.beds import Bed

pytestmark = pytest.mark.places

Record = Callable[[Outcome], None]
HEAD, WORKER = "host1", "host2"
SLOWLY = {"HPC_GRPO_STAND_IN_STEP_S": "0.5"}
SCRIPT = str(Path(__file__).resolve().parents[2] / "sbatch" / "launch_grpo_2nodes_ray.sh")
OVER_SSH = {"hosts": [HEAD, WORKER]}


def by_hand(scene: Scene, machine: str, role: str, *options: str, **environment: str) -> Command:
    """Type the script's line on a host that is told where the head is."""
    told = {"RAY_HEAD_IP": scene.bed.address(HEAD), "RAY_HEAD_PORT": "10001", **environment}
    return scene.type(machine, "bash", SCRIPT, role, str(scene.config), *options, **told)


def commands_by_hand(scene: Scene, **environment: str) -> dict[str, Command]:
    """The head first, then the worker."""
    head = by_hand(scene, HEAD, "head", "--driver", STEPPING, **environment)
    return {HEAD: head, WORKER: by_hand(scene, WORKER, "worker")}


def expect_complete(scene: Scene, record: Record) -> Outcome:
    outcome = scene.outcome()
    record(outcome)
    assert outcome.state == "complete", outcome
    assert scene.is_complete_to_the_end()
    assert scene.attempts[-1].num_gpus == 8
    return outcome


def assert_nothing_left(bed: Bed) -> None:
    assert residue_of(bed) == {}


@pytest.mark.long
def test_two_hosts_by_hand(hosts: Bed, record: Record) -> None:
    with Scene(hosts, "by-hand") as scene:
        for command in commands_by_hand(scene).values():
            assert command.wait() == 0, command.text
        expect_complete(scene, record)
    assert_nothing_left(hosts)


@pytest.mark.long
def test_two_hosts_over_ssh(hosts: Bed, record: Record) -> None:
    with Scene(hosts, "over-ssh", launch=OVER_SSH) as scene:
        command = scene.start_stepping(HEAD, "train", str(scene.config))
        assert command.wait() == 0, command.text
        expect_complete(scene, record)
    assert_nothing_left(hosts)


@pytest.mark.long
@pytest.mark.parametrize("launch", [{}, OVER_SSH], ids=["by-hand", "over-ssh"])
def test_two_hosts_train(hosts: Bed, record: Record, launch: dict[str, list[str]]) -> None:
    """Real training."""
    name = "trained-over-ssh" if launch else "trained-by-hand"
    with Scene(hosts, name, launch=launch, train={"total_steps": 4}) as scene:
        if launch:
            commands = [scene.start(HEAD, "train", str(scene.config))]
        else:
            commands = [by_hand(scene, HEAD, "head"), by_hand(scene, WORKER, "worker")]
        for command in commands:
            assert command.wait() == 0, command.text
        expect_complete(scene, record)
    assert_nothing_left(hosts)


@pytest.mark.long
def test_ctrl_c_over_ssh_keeps_a_checkpoint_and_leaves_nothing(hosts: Bed, record: Record) -> None:
    with Scene(hosts, "ssh-ctrl-c", launch=OVER_SSH) as scene:
        command = scene.start_stepping(HEAD, "train", str(scene.config), **SLOWLY)
        scene.strike(command.ctrl_c)
        assert command.wait() == 75, command.text
        stopped_at = scene.step
        assert_nothing_left(hosts)
        again = scene.start_stepping(HEAD, "train", str(scene.config))
        assert again.wait() == 0, again.text
        expect_complete(scene, record)
        assert scene.attempts[-1].first_step == stopped_at
    assert_nothing_left(hosts)


@pytest.mark.long
def test_a_host_over_ssh_that_is_lost_is_named(hosts: Bed, record: Record) -> None:
    with Scene(hosts, "ssh-lost", launch=OVER_SSH) as scene:
        command = scene.start_stepping(HEAD, "train", str(scene.config), **SLOWLY)
        scene.strike(lambda: hosts.kill(WORKER, cut_network=True))
        try:
            assert command.wait() == 69, command.text
            assert WORKER in command.text
            record(scene.outcome())
        finally:
            hosts.start(WORKER)
        # The next run of anybody's removes what a host that was killed has left in /tmp.
        again = scene.start_stepping(HEAD, "train", str(scene.config))
        assert again.wait() == 0, again.text
        assert scene.is_complete_to_the_end()
    assert_nothing_left(hosts)


@pytest.mark.parametrize("at", [HEAD, pytest.param(WORKER, marks=pytest.mark.long)])
def test_stop_on_either_host_leaves_nothing(hosts: Bed, record: Record, at: str) -> None:
    """On the head there is a checkpoint and the worker is told; on the worker the head names its loss."""
    with Scene(hosts, f"stop-at-{at}", launch={"rejoin_s": 5}) as scene:
        commands = commands_by_hand(scene, **SLOWLY)

        def blow() -> None:
            stop = by_hand(scene, at, "stop")
            assert stop.wait() == 0, stop.text

        scene.strike(blow)
        assert commands[at].wait() == 75, commands[at].text
        if at == HEAD:
            assert commands[WORKER].wait() == 75, commands[WORKER].text
            assert newest_step(scene.run) == scene.step
        else:
            assert commands[HEAD].wait() == 69, commands[HEAD].text
            assert WORKER in commands[HEAD].text
        outcome = scene.outcome()
        record(outcome)
        assert (outcome.state != "complete", scene.attempts[-1].num_gpus) == (True, 8)
    assert_nothing_left(hosts)


@pytest.mark.long
@pytest.mark.parametrize("at", [HEAD, WORKER])
def test_ray_stop_by_habit_costs_a_restart_of_ray(hosts: Bed, record: Record, at: str) -> None:
    with Scene(hosts, f"ray-stop-{at}") as scene:
        commands = commands_by_hand(scene, **SLOWLY)
        scene.strike(lambda: hosts.run(at, [str(PROGRAMS / "ray"), "stop"], deadline_s=60))
        scene.await_recovery()
        for command in commands.values():
            assert command.wait() == 0, command.text
        expect_complete(scene, record)
        assert len(scene.attempts[-1].restarts) == 1
    assert_nothing_left(hosts)
