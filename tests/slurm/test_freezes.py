"""The freeze table on two nodes: a process that is stopped (SIGSTOP) in a chained run, with the deadlines by default.

`tests/integration/test_freeze_table.py` has all phases on one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpc_grpo.run.attempt import read_attempts
from tests.integration.training_runs import LETTERS
from tests.slurm.scene import HEAD, WORKER, Scene

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.usefixtures("no_chain_outlives_its_test")]

_PYTHON = r"\S*python\S* "
PATTERNS = {
    "driver": _PYTHON + r"(\S+/source )?-m hpc_grpo.driver.main",
    "learner": "ray::Learner",
    "engine": "ray::Engine",
    "grader": "ray::Grader",
    "reward worker": _PYTHON + ".*hpc_grpo.grading.worker",
    "agent": _PYTHON + r"(-E )?(\S+/source )?-m hpc_grpo.launch.agent.agent",
    "raylet": r"\S*/raylet/raylet ",
}
NOTICED_WITHIN_S = 240.0


def wait_for_actor(scene: Scene, node: str, pattern: str, earlier: Sequence[str] = ()) -> str:
    """The first process of this pattern that comes up: while the run starts. `earlier`: of runs that end there yet."""
    found: list[str] = []

    def is_there() -> bool:
        found[:] = [pid for pid in scene.find(node, pattern) if pid not in earlier]
        return bool(found)

    scene.cluster.wait_until(is_there, NOTICED_WITHIN_S, f"{pattern} on {node}")
    return found[0]


@pytest.mark.parametrize(
    ("role", "node", "when"),
    [
        ("driver", HEAD, "training"),
        ("learner", WORKER, "training"),
        ("engine", WORKER, "training"),
        ("grader", WORKER, "training"),
        ("reward worker", WORKER, "training"),
        ("agent", WORKER, "training"),
        ("raylet", WORKER, "training"),
        ("driver", HEAD, "starting"),
        ("learner", WORKER, "starting"),
        ("engine", WORKER, "starting"),
        ("grader", WORKER, "starting"),
        ("agent", WORKER, "starting"),
        ("raylet", WORKER, "starting"),
    ],
)
def test_a_process_that_is_stopped(
    slurm_cluster: SlurmCluster, tmp_path: Path, show: Callable[[str], None], role: str, node: str, when: str
) -> None:
    sections: dict[str, Any] = {
        "rewards": [{"name": LETTERS, "args": {"delay_s": 0.2}}],
        "launch": {"min_nodes": 1} if role == "agent" else {},
    }
    if role in ("reward worker", "agent", "raylet"):  # else the run is complete before anybody notices
        sections["train"] = {"total_steps": 150, "lr": 1e-3}
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=2, **sections)
    earlier = {name: scene.find(node, PATTERNS[name]) for name in (role, "raylet")}
    if when == "training":
        scene.wait_for_step(5)
    if role == "agent":  # one that has not begun to give signs of life is noticed at the end of the bring-up
        wait_for_actor(scene, node, PATTERNS["raylet"], earlier["raylet"])
    pid = wait_for_actor(scene, node, PATTERNS[role], earlier[role])
    slurm_cluster.output(["kill", "-STOP", pid], on=node)
    begun = time.monotonic()
    try:
        slurm_cluster.wait_until(lambda: bool(what_was_said(scene, role, node, pid)), NOTICED_WITHIN_S, "it is noticed")
        noticed_s = time.monotonic() - begun
        outcome = scene.see_it_through()
        is_left = slurm_cluster.run(["kill", "-0", pid], on=node).returncode == 0
    finally:
        slurm_cluster.run(["kill", "-KILL", pid], on=node)
    ended = f"{outcome.state}; jobs {outcome.num_attempts}, driver restarts {outcome.num_restarts}"
    lost = f"steps lost {outcome.lost_steps}"
    show(f"| {role} on {node} | {when} | {noticed_s:.0f} | {what_was_said(scene, role, node, pid)} | {ended}, {lost} |")
    assert outcome.state == "complete", outcome.told
    assert not is_left, f"process {pid} on {node} outlived its run"


def what_was_said(scene: Scene, role: str, node: str, pid: str) -> str:
    """The first word of it in the record of the first attempt; of a reward worker only its end tells."""
    for record in read_attempts(scene.run)[:1]:
        for why in [*record.late, *record.restarts, *record.lost_nodes.values(), record.stuck, record.why]:
            if why:
                return why
    if role == "reward worker" and scene.cluster.run(["kill", "-0", pid], on=node).returncode:
        return "it was killed, and its call made again"
    return ""
