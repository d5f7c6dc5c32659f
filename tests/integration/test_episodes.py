"""Whole runs whose model acts in an environment, with the faults of environments among them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from hpc_grpo.demo.model import write_model
from hpc_grpo.learner.record import read_batches
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from tests.integration.mismatch import TOLERANCE
from tests.integration.training_runs import (
    HERE,
    LONG,
    PAUSING,
    Attempt,
    complete_in_cluster,
    differing_weights,
    metrics_of,
    tiny_config,
)
from tests.support.processes import wait_until

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


@pytest.fixture(scope="module")
def whole(workspace: Path, cluster: dict[str, str]) -> RunDir:
    """A synchronous run that nobody disturbs."""
    return complete_in_cluster(cluster, config_of(workspace, "episodes"))


def test_a_killed_run_of_episodes_ends_with_the_same_bits(
    workspace: Path, cluster: dict[str, str], whole: RunDir
) -> None:
    metrics = check(whole)
    assert max(values["mismatch/logprob_abs_diff_max"] for values in metrics.values()) < TOLERANCE
    assert {values["episode/turns"] for values in metrics.values()} == {3.0}
    assert metrics[STEPS]["reward/mean"] > metrics[1]["reward/mean"]
    lines = read_jsonl(whole.rollouts(1))
    assert all(
        len(line["turn_rewards"]) == 3 and line["reward"] == pytest.approx(sum(line["turn_rewards"])) for line in lines
    )
    for line in lines:
        assert [turn["reward"] for turn in line["turns"]] == line["turn_rewards"]
        assert [turn["observation"].isdigit() for turn in line["turns"]] == [False, True, True]
    config = config_of(workspace, "episodes-killed")
    with Attempt.in_cluster(cluster, config, PAUSING) as killed:
        killed.wait_for_step(STEPS // 2 + 1)
        killed.process.kill()
        assert killed.wait() == -signal.SIGKILL
    resumed = complete_in_cluster(cluster, config)
    check(resumed)
    assert differing_weights(resumed, whole) == []


def test_an_engine_killed_in_mid_episode_costs_no_ordinal_and_no_bit(
    workspace: Path, cluster: dict[str, str], whole: RunDir
) -> None:
    hang = workspace / "hang"
    config = config_of(workspace, "engine-killed", own={"timeout_s": 60}, troubles=str(workspace))
    hang.touch()
    with Attempt.in_cluster(cluster, config) as attempt:
        attempt.wait_until(lambda: not hang.exists(), "a turn whose environment hangs")
        [hung] = workspace.glob("hang.*")
        environment = psutil.Process(int(hung.suffix[1:]))
        engine = environment.parent()
        assert engine is not None
        assert engine.name().startswith("ray::Engine")
        engine.kill()
        run = attempt.wait_to_end()
    assert "An engine on" in attempt.text
    metrics = check(run)
    assert sum(values["episode/failed_fraction"] for values in metrics.values()) == 0.0
    assert not environment.is_running()
    assert differing_weights(run, whole) == []


@pytest.mark.long
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


@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.long)])
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
    wait_until(lambda: not any(psutil.pid_exists(int(path.name)) for path in pids.iterdir()), "no process is left")


def test_each_token_of_an_episode_has_the_version_of_the_weights_that_sampled_it(
    workspace: Path, cluster: dict[str, str]
) -> None:
    """Publishes come in mid-episode; `turns` compares the turns of a group."""
    config = config_of(workspace, "published", lag=2, delay_s=0.03)
    sections: dict[str, Any] = {
        "loss": {"advantage": "turns"},
        "checkpoint": {"keep_batches": STEPS, "export_every": 1},
    }
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | sections))
    run = complete_in_cluster(cluster, config)
    check(run)
    models = {0: workspace / "tied", **{step: run.export(step) for step in range(1, STEPS)}}
    policies = {version: AutoModelForCausalLM.from_pretrained(path) for version, path in models.items()}
    num_versions, num_advantages = [], []
    for step in range(1, STEPS + 1):
        [minibatch], _ = read_batches(run.batches(step))
        for sequence in minibatch.sequences:
            versions = sequence.policy_versions[sequence.loss_mask]
            assert (np.diff(versions) >= 0).all(), "no turn goes back to older weights"
            num_versions.append(len(set(versions.tolist())))
            num_advantages.append(len(set(sequence.advantages[sequence.loss_mask].tolist())))
            for version in set(versions.tolist()):
                of_version = sequence.loss_mask & (sequence.policy_versions == version)
                ids = torch.tensor(sequence.token_ids, dtype=torch.long)
                with torch.no_grad():
                    logits = policies[version](ids[None]).logits[0, :-1]
                logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
                apart = np.abs(logprobs - sequence.engine_logprobs[1:])[of_version[1:]]
                assert apart.max() < TOLERANCE, (step, version)
    assert max(num_versions) > 1, "no publish came in mid-episode"
    assert max(num_advantages) == 3, "each turn has an advantage of its own"


@pytest.mark.long
def test_a_critic_learns_from_games_and_tasks_with_a_second_try(workspace: Path, cluster: dict[str, str]) -> None:
    write_model(workspace / "long", LONG, seed=0)
    games = {"name": "textarena:GuessTheNumber-v0", "max_turns": 3, "max_tokens": 300}
    tasks = {"name": "reasoning_gym:simple_equations", "args": {"partial": True}, "max_turns": 3, "max_tokens": 300}
    rows = {"path": str(workspace / "train.jsonl"), "prompt_field": None, "answer_field": None}
    made = {"path": "reasoning_gym:simple_equations", "args": {"size": 50, "seed": 0}}
    config = tiny_config(
        workspace,
        "ppo-games",
        "long",
        task={"name": "ppo"},
        data={
            "train": {
                "mix": [
                    {**rows, "name": "games", "environment": games},
                    {**made, "environment": tasks},
                    {"path": rows["path"], "name": "letters", "environment": ENVIRONMENT},
                ]
            },
            "eval": None,
            "max_prompt_tokens": 640,
        },
        rewards=[],
        eval={"every": None, "reward": None},
        rollout={"max_new_tokens": 16},
        train={"total_steps": STEPS, "max_tokens_per_microbatch": 2048},
    )
    metrics = check(complete_in_cluster(cluster, config))
    assert all(values["episode/failed_fraction"] == 0.0 for values in metrics.values())
    assert all(values["critic/loss"] > 0.0 < values["grad_norm"] for values in metrics.values())
    assert {name for values in metrics.values() for name in values if name.startswith("episode/turns/")} == {
        f"episode/turns/{name}" for name in ("games", "letters", "simple_equations")
    }
