"""What happens to a run, and what becomes of it: nothing is done by hand afterwards but what a site does itself.

The rows marked `long` take minutes each; `make chaos` runs them and prints the table.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.chain import read_chain
from hpc_grpo.run.progress import read_state
from tests.integration.training_runs import metrics_of
from tests.slurm.scene import HEAD, SUPERVISOR, WORKER, Scene, full
from tests.support.outcomes import Outcome

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("no_chain_outlives_its_test")]

DRIVER = r"\S*python\S* (\S+/source )?-m hpc_grpo.driver.main"
ENGINE, LEARNER = "ray::Engine", "ray::LearnerActor"
RAYLET, GCS = r"\S*/raylet/raylet ", r"\S*/gcs/gcs_server "
TESTS = Path(__file__).resolve().parents[1]
CRASHING = str(TESTS / "stand_ins" / "crashing.py")
HUNGRY = f"{TESTS / 'integration' / 'hungry_reward.py'}:share_of_letters_hungry"

FULL_S = 40.0

Record = Callable[[Outcome], None]


def expect_complete(scene: Scene, record: Record, *, jobs: int, max_restarts: int) -> Outcome:
    outcome = scene.see_it_through()
    record(outcome)
    assert outcome.state == "complete", outcome
    state = read_state(scene.run)
    assert state is not None
    assert list(metrics_of(scene.run)) == list(range(1, state.total_steps + 1))
    assert outcome.num_attempts == jobs, outcome
    assert outcome.num_restarts <= max_restarts, outcome
    return outcome


@pytest.mark.parametrize(
    ("pattern", "node", "restarts"),
    [
        pytest.param(DRIVER, HEAD, 1, id="driver"),
        pytest.param(ENGINE, WORKER, 0, id="engine"),
        pytest.param(LEARNER, WORKER, 1, id="learner"),
        pytest.param(RAYLET, WORKER, 1, id="raylet"),
        pytest.param(GCS, HEAD, 1, id="gcs"),
    ],
)
@pytest.mark.long
def test_a_process_that_is_killed_costs_no_job(
    slurm_cluster: SlurmCluster, tmp_path: Path, record: Record, pattern: str, node: str, restarts: int
) -> None:
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=2)
    scene.strike(lambda: scene.kill(node, pattern))
    expect_complete(scene, record, jobs=1, max_restarts=restarts)


def test_a_killed_driver_then_engine_then_node_cost_no_job(
    slurm_cluster: SlurmCluster, tmp_path: Path, record: Record
) -> None:
    """Three rows in one run, for CI. `min_nodes` is 1: the survivor goes on, with half the learners."""
    steps = {"total_steps": 20, "lr": 1e-3}
    scene = Scene.submit_run(
        slurm_cluster, tmp_path, num_nodes=2, launch={"min_nodes": 1}, train=steps, slurm={"time_min": 20}
    )
    scene.strike(lambda: scene.kill(HEAD, DRIVER))
    slurm_cluster.wait_until(lambda: scene.step >= 8, 300.0, "the driver was started again")
    scene.strike(lambda: scene.kill(HEAD, ENGINE))
    slurm_cluster.wait_until(lambda: scene.step >= 12, 300.0, "the driver goes on with another engine")
    (attempt,) = read_attempts(scene.run)
    (restart,) = attempt.restarts
    assert "killed by SIGKILL" in restart
    log = scene.run.attempt(attempt.attempt, attempt.job_id) / "driver.log"
    assert "died; starting another (restart 1)" in log.read_text()
    scene.strike(lambda: slurm_cluster.kill_node(WORKER))
    try:
        # Gloo sees it first, then Ray, then Slurm: the driver may be started in vain twice before.
        expect_complete(scene, record, jobs=1, max_restarts=1 + 3)
    finally:
        slurm_cluster.start_node(WORKER)
    (attempt,) = read_attempts(scene.run)
    assert list(attempt.lost_nodes) == [WORKER]


@pytest.mark.long
def test_a_supervisor_that_is_killed_costs_one_job(slurm_cluster: SlurmCluster, tmp_path: Path, record: Record) -> None:
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=2)
    scene.strike(lambda: scene.kill(HEAD, SUPERVISOR))
    expect_complete(scene, record, jobs=2, max_restarts=0)


@pytest.mark.long
def test_a_node_that_is_lost_costs_one_job(slurm_cluster: SlurmCluster, tmp_path: Path, record: Record) -> None:
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=2)
    scene.strike(lambda: slurm_cluster.kill_node(WORKER))
    slurm_cluster.wait_for_job(int(scene.jobs[0]), 300.0)
    slurm_cluster.start_node(WORKER)
    expect_complete(scene, record, jobs=2, max_restarts=1)  # the driver's, where it notices before Slurm does


@pytest.mark.long
def test_a_lost_head_node_costs_one_job(slurm_cluster: SlurmCluster, tmp_path: Path, record: Record) -> None:
    """The successor starts on the other node."""
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=1)
    scene.strike(lambda: slurm_cluster.kill_node(HEAD))
    try:
        expect_complete(scene, record, jobs=2, max_restarts=0)
    finally:
        slurm_cluster.start_node(HEAD)
    assert [attempt.nodes for attempt in read_attempts(scene.run)] == [[HEAD], [WORKER]]


@pytest.mark.long
def test_a_slurmd_that_is_killed(slurm_cluster: SlurmCluster, tmp_path: Path, record: Record) -> None:
    """To Slurm the node is lost, while what runs there runs on; its site starts slurmd again."""
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=2, train={"total_steps": 150})
    scene.strike(lambda: scene.kill(WORKER, r"slurmd"))
    slurm_cluster.wait_for_job(int(scene.jobs[0]), 300.0)
    slurm_cluster.output(["slurmd"], on=WORKER)
    expect_complete(scene, record, jobs=2, max_restarts=1)


@pytest.mark.long
def test_a_job_that_needs_too_much_memory(slurm_cluster: SlurmCluster, tmp_path: Path, record: Record) -> None:
    """Slurm kills the step that holds too much; with it go Ray, learner and engines of that node."""
    meal = tmp_path / "meal"
    reward = {"name": HUNGRY, "args": {"meal": str(meal), "delay_s": 0.2}, "timeout_s": 60}
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=2, rewards=[reward], eval={"reward": HUNGRY})
    scene.strike(meal.touch)
    outcome = scene.see_it_through()
    record(outcome)
    assert outcome.state == "complete"


@pytest.mark.long
def test_scancel_of_a_link_ends_the_chain(slurm_cluster: SlurmCluster, tmp_path: Path, record: Record) -> None:
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=2)
    scene.strike(lambda: slurm_cluster.output(["scancel", scene.jobs[0]]))
    outcome = scene.see_it_through()
    record(outcome)
    assert (outcome.state, outcome.num_attempts) == ("cancelled", 1)
    assert "cancelled by the user" in read_chain(scene.run).ended


@pytest.mark.long
def test_scancel_of_the_successor_alone(slurm_cluster: SlurmCluster, tmp_path: Path, record: Record) -> None:
    """The run needs two jobs: the link queues another when it ends."""
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=1, slurm={"time_min": 2}, train={"total_steps": 60})
    scene.strike(lambda: slurm_cluster.output(["scancel", read_chain(scene.run).successor]))
    outcome = scene.see_it_through()
    record(outcome)
    assert outcome.state == "complete"
    assert list(metrics_of(scene.run)) == list(range(1, 61))


@pytest.mark.long
def test_hpc_grpo_cancel(slurm_cluster: SlurmCluster, tmp_path: Path, record: Record) -> None:
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=2)
    scene.strike(lambda: scene.command("stop", "--now", str(scene.run.path)))
    outcome = scene.see_it_through()
    record(outcome)
    assert outcome.num_attempts == 1
    assert outcome.state != "complete"


@pytest.mark.long
def test_slurmctld_down_for_a_minute(slurm_cluster: SlurmCluster, tmp_path: Path, record: Record) -> None:
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=2)

    def blow() -> None:
        scene.kill("slurmctl", "slurmctld")
        time.sleep(60.0)
        slurm_cluster.output(["slurmctld"], on="slurmctl")

    # The run is over before Slurm is back: its successor finds it complete and says so.
    scene.strike(blow)
    expect_complete(scene, record, jobs=1, max_restarts=0)


@pytest.mark.long
def test_a_full_disk(slurm_cluster: SlurmCluster, small_disk: Path, tmp_path: Path, record: Record) -> None:
    """The disk of the run directory, for `FULL_S`."""
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=2, run={"root": str(small_disk)})

    def blow() -> None:
        with full(small_disk, FULL_S):
            pass

    scene.strike(blow)
    expect_complete(scene, record, jobs=1, max_restarts=0)
    times = [values["time"] for values in metrics_of(scene.run).values()]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) > FULL_S / 2, "it did not wait"


@pytest.mark.long
def test_a_network_that_is_cut_for_20_s_is_waited_out(
    slurm_cluster: SlurmCluster, tmp_path: Path, record: Record
) -> None:
    """The head's, over which the driver's calls go. By Ray's default a lost call is awaited for seven minutes."""
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=2, launch={"min_nodes": 1})

    def blow() -> None:
        slurm_cluster.unplug(HEAD)
        time.sleep(20.0)
        slurm_cluster.plug(HEAD)

    scene.strike(blow)
    outcome = expect_complete(scene, record, jobs=1, max_restarts=1)
    assert outcome.lost_s is not None
    assert outcome.lost_s < 180, outcome


@pytest.mark.long
def test_a_network_that_is_cut_for_good(slurm_cluster: SlurmCluster, tmp_path: Path, record: Record) -> None:
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=2, launch={"min_nodes": 1})
    scene.strike(lambda: slurm_cluster.unplug(WORKER))
    try:
        outcome = scene.see_it_through()
    finally:
        slurm_cluster.plug(WORKER)
    record(outcome)
    assert outcome.state == "complete"


@pytest.mark.long
def test_a_bug_that_crashes_every_start(slurm_cluster: SlurmCluster, tmp_path: Path, record: Record) -> None:
    scene = Scene.submit_run(slurm_cluster, tmp_path, num_nodes=1, driver=CRASHING)
    outcome = scene.see_it_through()
    record(outcome)
    assert (outcome.state, outcome.num_attempts) == ("failed", 2)
    assert "No new checkpoint in 2 attempts" in read_chain(scene.run).ended
    assert "RuntimeError: a bug that every start meets" in outcome.told
