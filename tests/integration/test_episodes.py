"""Whole runs whose model acts in an environment, with the faults of environments among them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from tests.integration.kill_resume import differing_weights
from tests.integration.mismatch import TOLERANCE
from tests.integration.training_runs import HERE, PAUSING, Attempt, complete_in_cluster, metrics_of, tiny_config

pytestmark = [pytest.mark.integration, pytest.mark.cluster]

STEPS = 5
ENVIRONMENT = {
    "name": f"{HERE / 'letters_environment.py'}:Letters",
    "max_turns": 3,
    "max_tokens": 40,
    "timeout_s": 5,
    "num_workers": 1,
}


def config_of(workspace: Path, name: str, lag: int = 0, own: Any = None, **args: Any) -> Path:
    sections: dict[str, Any] = {
        "environment": {**ENVIRONMENT, **(own or {}), "args": args},
        "rewards": [],
        "eval": {"every": None},
        "rollout": {"max_new_tokens": 8, "max_policy_lag": lag},
        "engine": {"engines_per_node": 2},
        "train": {"total_steps": STEPS},
    }
    return tiny_config(workspace, name, **sections)


def own_python(workspace: Path) -> str:
    """Return the Python of a virtual environment without packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(workspace / "venv")], check=True)
    return str(workspace / "venv" / "bin" / "python")


def check(run: RunDir) -> dict[int, dict[str, Any]]:
    verdict = check_ledger(run)
    assert verdict.is_sound, verdict
    assert (verdict.steps, verdict.ordinals) == (STEPS, STEPS * 6)
    return metrics_of(run)


def test_a_killed_run_of_episodes_ends_with_the_same_bits(workspace: Path, cluster: dict[str, str]) -> None:
    whole = complete_in_cluster(cluster, config_of(workspace, "episodes"))
    metrics = check(whole)
    assert max(values["mismatch/logprob_abs_diff_max"] for values in metrics.values()) < TOLERANCE
    assert {values["episode/turns"] for values in metrics.values()} == {3.0}
    assert metrics[STEPS]["reward/mean"] > metrics[1]["reward/mean"]
    lines = read_jsonl(whole.rollouts(1))
    assert all(
        len(line["turn_rewards"]) == 3 and line["reward"] == pytest.approx(sum(line["turn_rewards"])) for line in lines
    )
    config = config_of(workspace, "episodes-killed")
    with Attempt.in_cluster(cluster, config, PAUSING) as killed:
        killed.wait_for_step(STEPS // 2 + 1)
        killed.process.kill()
        assert killed.wait() == -signal.SIGKILL
    resumed = complete_in_cluster(cluster, config)
    check(resumed)
    assert differing_weights(resumed, whole) == []


def test_environments_that_are_killed_and_stopped_cost_no_ordinal(workspace: Path, cluster: dict[str, str]) -> None:
    pids = workspace / "pids"
    with Attempt.in_cluster(cluster, config_of(workspace, "faults", lag=1, delay_s=0.05, pids=str(pids))) as attempt:
        attempt.wait_for_step(1)
        first, *others = [int(path.name) for path in pids.iterdir() if psutil.pid_exists(int(path.name))]
        os.kill(first, signal.SIGKILL)
        for other in others:
            os.kill(other, signal.SIGSTOP)
        run = attempt.wait_to_end()
    metrics = check(run)
    assert others, "each engine has a process of its own"
    assert sum(values["episode/failed_fraction"] for values in metrics.values()) == 0.0
    left = [int(path.name) for path in pids.iterdir() if psutil.pid_exists(int(path.name))]
    assert left == []


@pytest.mark.parametrize("lag", [0, 1])
def test_agents_of_another_python_train_and_killed_ones_cost_no_ordinal(
    workspace: Path, cluster: dict[str, str], lag: int
) -> None:
    pids, deaths = workspace / f"pids-{lag}", workspace / f"deaths-{lag}"
    pids.mkdir()
    deaths.mkdir()
    agent = {"name": f"{HERE / 'letters_agent.py'}:LettersAgent", "python": own_python(workspace)}
    config = config_of(workspace, f"agents-{lag}", lag, agent, pids=str(pids), deaths=str(deaths))
    with Attempt.in_cluster(cluster, config) as attempt:
        for step in (1, 3):
            attempt.wait_for_step(step)
            (deaths / str(step)).touch()
        run = attempt.wait_to_end()
    metrics = check(run)
    assert list(deaths.iterdir()) == []
    assert len(list(pids.iterdir())) == 3 + 2, "one that checks it, one of each engine, and two in place of the killed"
    assert lag or max(values["mismatch/logprob_abs_diff_max"] for values in metrics.values()) < TOLERANCE
    assert [values["episode/turns"] for values in metrics.values()] == [3.0] * STEPS
    assert sum(values["episode/failed_fraction"] for values in metrics.values()) == 0.0
    assert [int(path.name) for path in pids.iterdir() if psutil.pid_exists(int(path.name))] == []
