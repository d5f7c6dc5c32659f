"""Blows at a chained run on two nodes: random ones, fifty in three seeds, and those that a run of episodes meets.

Twenty minutes a seed. BLOWS=10 strikes fewer.
"""

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

from tests.integration.training_runs import HERE, metrics_of
from tests.slurm.scene import DEADLINE_S, HEAD, SUPERVISOR, WORKER, Scene, full
from tests.slurm.small_runs import SmallRun

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.usefixtures("no_chain_outlives_its_test")]

NUM_BLOWS = int(os.environ.get("BLOWS", "17"))
STEPS_A_BLOW = 14
STEPS_BETWEEN = 4
CUT_OFF_S = 20.0
FROZEN_S = 50.0
"""Less than the lease of the agents."""
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

OF_EPISODES = {
    "environment killed": (WORKER, "KILL", r".*hpc_grpo\.episodes\.host"),
    "environment stopped": (HEAD, "STOP", r".*hpc_grpo\.episodes\.host"),
    "engine killed": (WORKER, "KILL", "ray::Engine"),
    "driver killed": (HEAD, "KILL", r"\S*python\S* (\S+/source )?-m hpc_grpo.driver.main"),
    "SIGTERM": (HEAD, "TERM", SUPERVISOR),
}
"""Where which signal goes to one process of which title."""
TROUBLES = {"tool hangs": "hang", "environment slow": "slow", "environment floods": "flood"}


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
            state = ["ps", "-o", "stat=", *scene.pids(HEAD, SUPERVISOR)]
            cluster.wait_until(lambda: "T" not in cluster.output(state, on=HEAD), FROZEN_S, "the supervisor goes on")
        case "disk":
            with full(disk, CUT_OFF_S):
                pass
        case "disk at start":
            with full(disk, CUT_OFF_S):
                signal_supervisor("KILL")
        case _ if kind in TROUBLES:
            asked = disk / TROUBLES[kind]
            asked.touch()
            cluster.wait_until(lambda: not asked.exists(), DEADLINE_S, kind)
        case _ if kind in OF_EPISODES:
            on, name, title = OF_EPISODES[kind]
            cluster.output(["kill", f"-{name}", scene.pids(on, title)[0]], on=on)
        case "two at once":
            strike(scene, "environment killed", chance)
            strike(scene, "engine killed", chance)
        case "bad node":
            (disk / f"bad-{HEAD}").touch()
            signal_supervisor("KILL")
        case _:
            node, pid, title = chance.choice(processes(cluster, job))
            with suppress(AssertionError):  # it may be over by now
                cluster.output(["kill", f"-{kind}", pid], on=node)
            return f"{node}: {title[-60:]}"
    return node if kind in ("node", "cable") else f"job {job}"


def steps_despite(scene: Scene, happens: Callable[[], str]) -> tuple[int, float, str]:
    """Let something happen, and wait; return how many steps were done since then, in how many seconds, despite what."""
    before, begun = scene.step, time.monotonic()
    what, wanted = happens(), before + STEPS_BETWEEN
    scene.cluster.wait_until(
        lambda: scene.step >= wanted or scene.run.is_complete(), DEADLINE_S, f"{STEPS_BETWEEN} steps after {what}"
    )
    return scene.step - before, time.monotonic() - begun, what


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
    num_steps, seconds, _ = steps_despite(scene, lambda: "the first one")
    step_s = seconds / num_steps
    lost_s = []
    for number, kind in enumerate(kinds, 1):
        assert not scene.run.is_complete(), f"complete after {number - 1} blows: more steps are needed"
        num_steps, seconds, blow = steps_despite(scene, lambda kind=kind: f"{kind} of {strike(scene, kind, chance)}")  # type: ignore[misc]
        lost_s.append(max(0.0, seconds - num_steps * step_s))
        show(f"seed {seed}, blow {number}, {blow}: {lost_s[-1]:.0f} s lost")
    show(f"seed {seed}: {completed(scene)}, {sum(lost_s) / len(lost_s):.0f} s lost a blow")


def completed(scene: Scene) -> str:
    """See that the run completes, with a sound ledger, and that its jobs leave nothing; say what it took."""
    outcome = scene.see_it_through()
    assert outcome.state == "complete", outcome
    for job in scene.jobs:
        for name, left in SmallRun(scene.cluster, scene.run, int(job)).node_states().items():
            assert (left.processes, left.folders, left.shared_memory) == ([], [], []), f"left of job {job} on {name}"
    return (
        f"{outcome.state}, {outcome.num_attempts} jobs, {outcome.num_restarts} restarts, {outcome.lost_steps} steps "
        f"trained twice"
    )


def test_blows_at_a_run_of_episodes_cost_no_ordinal_and_leave_nothing(
    slurm_cluster: SlurmCluster, small_disk: Path, tmp_path: Path, show: Callable[[str], None]
) -> None:
    kinds = [*OF_EPISODES, *TROUBLES, "two at once", "disk", "node"]
    args = {"delay_s": 0.05, "troubles": str(small_disk)}
    scene = Scene.submit_run(
        slurm_cluster,
        tmp_path,
        num_nodes=2,
        environment={
            "name": f"{HERE / 'letters_environment.py'}:Letters",
            "args": args,
            "max_turns": 3,
            "max_tokens": 40,
            "timeout_s": 5,
            "num_workers": 1,
        },
        rewards=[],
        eval={"every": None},
        rollout={"max_new_tokens": 8, "max_policy_lag": 1, "logged_fraction": 0.0},
        grading={"max_failed_fraction": 0.5},
        run={"root": str(small_disk)},
        train={"total_steps": 2 * STEPS_BETWEEN * len(kinds), "lr": 1e-3},
    )
    scene.wait_for_step(1)
    for kind in kinds:
        assert not scene.run.is_complete(), f"complete before {kind}: more steps are needed"
        steps, seconds, _ = steps_despite(scene, lambda kind=kind: strike(scene, kind, random.Random(0)))  # type: ignore[misc]
        show(f"{kind}: {steps} steps in {seconds:.0f} s")
    show(completed(scene))
    failed = sum(values["episode/failed_fraction"] for values in metrics_of(scene.run).values()) * 24
    assert failed == pytest.approx(1.0), "the turn that hung masks its own episode, and nothing else"
