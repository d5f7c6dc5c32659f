"""Twenty random blows at a chained run on two nodes; whatever is struck is picked blindly. Twenty minutes a seed."""

from __future__ import annotations

import random
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.slurm.scene import DEADLINE_S, Scene
from tests.slurm.small_runs import SmallRun

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.usefixtures("no_chain_outlives_its_test")]

NUM_BLOWS = 20
NUM_STEPS = 240
KINDS = ("KILL", "STOP", "TERM", "node", "cable")
WEIGHTS = (6, 5, 5, 2, 2)
STEPS_BETWEEN = 3
CUT_OFF_S = 20.0
_LIST = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    "from node_state import members, title_of\n"
    "for process in members(sys.argv[1]):\n    print(process.pid, title_of(process))"
)


@dataclass
class Blow:
    """`lost_s` is the time until a step was done that had not been."""

    kind: str
    target: str
    lost_s: float = 0.0


def processes(cluster: SlurmCluster, job: str) -> list[tuple[str, str, str]]:
    """Node, pid and title of all that the job runs, agents and Ray's own among them."""
    found = []
    for node in cluster.node_names:
        for line in cluster.output([sys.executable, "-c", _LIST, job], on=node).splitlines():
            pid, _, title = line.partition(" ")
            found += [(node, pid, title.strip())] if title.strip() else []  # what has no command line is over
    return found


def strike(cluster: SlurmCluster, scene: Scene, chance: random.Random) -> Blow:
    """Do something to a node of the newest job, or to one of the job's processes."""
    kind = chance.choices(KINDS, WEIGHTS)[0]
    if kind not in ("node", "cable"):
        node, pid, title = chance.choice(processes(cluster, scene.running_job()))
        with suppress(AssertionError):  # it may be over by now
            cluster.output(["kill", f"-{kind}", pid], on=node)
        return Blow(kind, f"{node}: {title[-60:]}")
    node = chance.choice(cluster.node_names)
    if kind == "node":
        cluster.kill_node(node)
        time.sleep(CUT_OFF_S)
        cluster.start_node(node)
    else:
        cluster.unplug(node)
        time.sleep(CUT_OFF_S)
        cluster.plug(node)
    return Blow(kind, node)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_twenty_random_blows_cost_no_step_and_leave_nothing(
    slurm_cluster: SlurmCluster, tmp_path: Path, show: Any, seed: int
) -> None:
    chance = random.Random(seed)
    slurm = {"time_min": 15}
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=2, slurm=slurm, train={"total_steps": NUM_STEPS})
    scene.wait_for_step(1)
    blows: list[Blow] = []
    for number in range(1, NUM_BLOWS + 1):
        assert not scene.run.is_complete(), f"complete after {number - 1} blows: more steps are needed"
        before, struck_at = scene.step, time.monotonic()
        blow = strike(slurm_cluster, scene, chance)
        slurm_cluster.wait_until(lambda before=before: scene.step > before, DEADLINE_S, f"a step after {blow}")  # type: ignore[misc]
        blow.lost_s = time.monotonic() - struck_at
        blows.append(blow)
        show(f"seed {seed}, blow {number}: {blow.kind} {blow.target}: {blow.lost_s:.0f} s")
        wanted = scene.step + STEPS_BETWEEN
        slurm_cluster.wait_until(
            lambda wanted=wanted: scene.step >= wanted or scene.run.is_complete(),  # type: ignore[misc]
            DEADLINE_S,
            f"{STEPS_BETWEEN} steps after {blow}",
        )
    outcome = scene.see_it_through()
    show(
        f"seed {seed}: {outcome.state}, {outcome.num_attempts} jobs, {outcome.num_restarts} restarts, "
        f"{outcome.lost_steps} steps trained twice, {sum(blow.lost_s for blow in blows) / NUM_BLOWS:.0f} s a blow"
    )
    assert outcome.state == "complete"
    for job in scene.jobs:
        for name, node in SmallRun(slurm_cluster, scene.run, int(job)).node_states().items():
            assert (node.processes, node.folders, node.shared_memory) == ([], [], []), f"left of job {job} on {name}"
