"""Random blows at a chained run on two nodes, fifty in three seeds; twenty minutes a seed. BLOWS=10 strikes fewer."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.slurm.scene import DEADLINE_S, HEAD, SUPERVISOR, Scene, full
from tests.slurm.small_runs import SmallRun

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.usefixtures("no_chain_outlives_its_test")]

NUM_BLOWS = int(os.environ.get("BLOWS", "17"))
STEPS_A_BLOW = 12
STEPS_BETWEEN = 3
CUT_OFF_S = 20.0
FIRST = ("hangup", "bad node")
"""The first link ends in order, and the third one dies before hpc-grpo runs in it."""
SIGNALS = {"KILL": 6, "STOP": 5, "TERM": 5, "HUP": 3}
"""Sent to any process of the job. The weights of the other kinds are 2."""
KINDS = (*SIGNALS, "node", "cable", "hangup", "frozen", "disk", "disk at start", "bad node")
_LIST = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    "from node_state import members, title_of\n"
    "for process in members(sys.argv[1]):\n    print(process.pid, title_of(process))"
)


def processes(cluster: SlurmCluster, job: str) -> list[tuple[str, str, str]]:
    """Node, pid and title of all that the job runs, agents and Ray's own among them."""
    found = []
    for node in cluster.node_names:
        for line in cluster.output([sys.executable, "-c", _LIST, job], on=node).splitlines():
            pid, _, title = line.partition(" ")
            found += [(node, pid, title.strip())] if title.strip() else []  # what has no command line is over
    return found


def strike(scene: Scene, kind: str, chance: random.Random) -> str:
    """Do something to the newest job, its nodes or its disk; return to what."""
    cluster, node, job = scene.cluster, chance.choice(scene.cluster.node_names), scene.running_job()
    disk = scene.run.path.parent

    def signal_supervisor(name: str) -> None:
        cluster.output(["kill", f"-{name}", *scene.pids(HEAD, SUPERVISOR)], on=HEAD)

    match kind:
        case "node":
            cluster.kill_node(node)
            time.sleep(CUT_OFF_S)
            cluster.start_node(node)
        case "cable":
            cluster.unplug(node)
            time.sleep(CUT_OFF_S)
            cluster.plug(node)
        case "hangup":
            signal_supervisor("HUP")
        case "frozen":
            signal_supervisor("STOP")
        case "disk":
            with full(disk, CUT_OFF_S):
                pass
        case "disk at start":
            with full(disk, CUT_OFF_S):
                signal_supervisor("KILL")
        case "bad node":
            (disk / f"bad-{HEAD}").touch()
            signal_supervisor("KILL")
        case _:
            node, pid, title = chance.choice(processes(cluster, job))
            with suppress(AssertionError):  # it may be over by now
                cluster.output(["kill", f"-{kind}", pid], on=node)
            return f"{node}: {title[-60:]}"
    return node if kind in ("node", "cable") else f"job {job}"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_blows_cost_no_step_and_leave_nothing(
    slurm_cluster: SlurmCluster, small_disk: Path, tmp_path: Path, show: Callable[[str], None], seed: int
) -> None:
    chance = random.Random(seed)
    others = [kind for kind in KINDS if kind not in FIRST]
    kinds = [*FIRST, *chance.sample(others, len(others))][:NUM_BLOWS]
    kinds += chance.choices(KINDS, [SIGNALS.get(kind, 2) for kind in KINDS], k=NUM_BLOWS - len(kinds))
    scene = Scene.submit_run(
        slurm_cluster,
        tmp_path,
        num_nodes=2,
        slurm={"time_min": 15},
        run={"root": str(small_disk)},
        train={"total_steps": STEPS_A_BLOW * NUM_BLOWS},
        # A node that is bad for one job, as with a module or a mount that is missing.
        launch={"setup_lines": [f'! rm "{small_disk}/bad-$(hostname)" 2> /dev/null || exit 1']},
    )
    scene.wait_for_step(1)
    lost_s = []
    for number, kind in enumerate(kinds, 1):
        assert not scene.run.is_complete(), f"complete after {number - 1} blows: more steps are needed"
        before, struck_at = scene.step, time.monotonic()
        blow = f"blow {number}, {kind} of {strike(scene, kind, chance)}"
        slurm_cluster.wait_until(lambda before=before: scene.step > before, DEADLINE_S, f"a step after {blow}")  # type: ignore[misc]
        lost_s.append(time.monotonic() - struck_at)
        show(f"seed {seed}, {blow}: {lost_s[-1]:.0f} s")
        wanted = scene.step + STEPS_BETWEEN
        slurm_cluster.wait_until(
            lambda wanted=wanted: scene.step >= wanted or scene.run.is_complete(),  # type: ignore[misc]
            DEADLINE_S,
            f"{STEPS_BETWEEN} steps after {blow}",
        )
    outcome = scene.see_it_through()
    show(
        f"seed {seed}: {outcome.state}, {outcome.num_attempts} jobs, {outcome.num_restarts} restarts, "
        f"{outcome.lost_steps} steps trained twice, {sum(lost_s) / len(lost_s):.0f} s a blow"
    )
    assert outcome.state == "complete"
    for job in scene.jobs:
        for name, left in SmallRun(slurm_cluster, scene.run, int(job)).node_states().items():
            assert (left.processes, left.folders, left.shared_memory) == ([], [], []), f"left of job {job} on {name}"
