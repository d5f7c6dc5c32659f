"""Stopped, killed and started again: the run ends as if nothing had happened."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.errors import EXIT_CRASH, EXIT_RESUMABLE
from hpc_grpo.launch.fork import fork
from hpc_grpo.run.checkpoint import valid_checkpoints
from hpc_grpo.run.contract import KEEPS_ENGINES_VARIABLE
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from tests.integration.conftest import SFT_STEPS, SYNC_STEPS
from tests.integration.mismatch import TOLERANCE
from tests.integration.training_runs import (
    HERE,
    PAUSING,
    Attempt,
    complete_in_cluster,
    differing_weights,
    metrics_of,
    tiny_config,
)

pytestmark = pytest.mark.integration

ASYNC_STEPS = 10
NUM_ROLLOUTS = 6 * 4
FORKS = {"fork": [], "hotter": ["train.lr=3e-3"]}


def stopped_at(run_dir: RunDir) -> int:
    """The step of the newest checkpoint, which a run that was asked to stop has just written."""
    checkpoint = next(valid_checkpoints(run_dir), None)
    assert checkpoint is not None
    steps = [line["step"] for line in read_jsonl(run_dir.ledger)]
    assert checkpoint.step == steps[-1]
    return checkpoint.step


def test_stop_file_ends_a_run_that_can_be_taken_up_again(stopped_sft: tuple[Attempt, Attempt]) -> None:
    stopped, completed = stopped_sft
    step = max(line["step"] for line in read_jsonl(completed.run_dir.ledger) if line["attempt"] == stopped.number)
    assert f"Stopping after step {step}: the STOP file." in stopped.text
    assert f"Resuming after step {step} of {SFT_STEPS}." in completed.text
    verdict = check_ledger(completed.run_dir)
    assert verdict.is_sound, verdict
    assert (verdict.steps, verdict.undone) == (SFT_STEPS, 0)


@pytest.fixture
def keeping(cluster: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment of drivers that leave their engines to the next one."""
    yield {**cluster, KEEPS_ENGINES_VARIABLE: "1"}
    end_engines(cluster, "all")


def end_engines(cluster: dict[str, str], which: str) -> None:
    command = [sys.executable, "-m", "tests.integration.left_engines", which]
    done = subprocess.run(command, env=cluster, cwd=HERE.parents[1], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_killed_synchronous_run_ends_with_the_same_bits(
    workspace: Path, keeping: dict[str, str], sync_run: RunDir, sync_settings: dict[str, Any]
) -> None:
    """The driver dies with one of its two engines; the next one goes on with the other."""
    config = tiny_config(workspace, "killed", **sync_settings)
    with Attempt.in_cluster(keeping, config, PAUSING) as killed:
        killed.wait_for_step(SYNC_STEPS // 2 + 1)
        killed.process.kill()
        assert killed.wait() == -signal.SIGKILL
    end_engines(keeping, "one")
    with Attempt.in_cluster(keeping, config) as resumed:
        run_dir = resumed.wait_to_end()
    assert "Keeping 1 of the 1 engines of the previous driver." in resumed.text
    assert differing_weights(run_dir, sync_run) == []
    verdict = check_ledger(run_dir)
    assert verdict.is_sound, verdict
    assert verdict.steps == SYNC_STEPS
    rewards = [[values["reward/mean"] for values in metrics_of(run).values()] for run in (run_dir, sync_run)]
    assert rewards[0] == rewards[1]


def test_a_fork_goes_on_with_the_same_bits_or_at_another_learning_rate(
    cluster: dict[str, str], sync_run: RunDir
) -> None:
    step = min(found.step for found in valid_checkpoints(sync_run))
    assert step < SYNC_STEPS
    same, other = (fork(sync_run, step, [], [f"run.name={name}", *words]) for name, words in FORKS.items())
    for run in (same, other):
        complete_in_cluster(cluster, run.config)
        assert check_ledger(run).is_sound
    assert differing_weights(same, sync_run) == []
    assert differing_weights(other, sync_run)
    straight, again, hotter = (metrics_of(run) for run in (sync_run, same, other))
    assert [*straight] == [*again] == [*hotter] == [*range(1, SYNC_STEPS + 1)]
    for key in ("reward/mean", "lr", "grad_norm"):
        assert [values[key] for values in straight.values()] == [values[key] for values in again.values()], key
    assert [values["lr"] for values in hotter.values()] == [1e-3] * step + [3e-3] * (SYNC_STEPS - step)
    # The first step after the fork has the same rollouts and the same gradient; the weights differ after it.
    assert hotter[step + 1]["grad_norm"] == straight[step + 1]["grad_norm"]


@pytest.mark.long
def test_killed_run_that_fills_its_steps_meets_the_same_batches_again(
    workspace: Path, cluster: dict[str, str], sync_settings: dict[str, Any]
) -> None:
    """Prompts are dropped, rest and come back: each choice is made again, and no bit of the weights differs."""
    reward = f"{HERE / 'letters_reward.py'}:one_in_three"
    settings: dict[str, Any] = {
        **sync_settings,
        "data": {
            "train": {"path": str(workspace / "train.jsonl"), "max_items": 30},
            "curriculum": {"after": 1, "easy_rest": 2, "hard_to": 0.0, "hard_rest": 1},
        },
        "rewards": [{"name": reward}],
        "eval": {"reward": reward},
        "rollout": {"dynamic_sampling": 3, "max_new_tokens": 24},
    }
    whole = complete_in_cluster(cluster, tiny_config(workspace, "filled", **settings))
    config = tiny_config(workspace, "filled-killed", **settings)
    with Attempt.in_cluster(cluster, config, PAUSING) as killed:
        killed.wait_for_step(SYNC_STEPS // 2 + 1)
        killed.process.kill()
        assert killed.wait() == -signal.SIGKILL
    run_dir = complete_in_cluster(cluster, config)
    assert differing_weights(run_dir, whole) == []
    verdict = check_ledger(run_dir)
    assert verdict.is_sound, verdict
    assert verdict.undone > 0
    assert min(verdict.dropped, verdict.passed_over) > 0, verdict
    assert verdict.dropped + verdict.passed_over < verdict.ordinals, "some groups taught something"
    ours, theirs = ({line["step"]: line for line in read_jsonl(run.ledger)} for run in (run_dir, whole))
    for step, line in theirs.items():
        assert {**ours[step], "attempt": 1} == line
    names = ("reward/mean", "groups/trained", "groups/dropped_alike", "curriculum/easy", "data/epochs", "loss/policy")
    metrics = [[[values.get(n) for n in names] for values in metrics_of(run).values()] for run in (run_dir, whole)]
    assert metrics[0] == metrics[1]
    print(verdict, *zip(names, zip(*metrics[0], strict=True), strict=True), sep="\n")


def test_run_that_samples_ahead_survives_a_signal(workspace: Path, cluster: dict[str, str]) -> None:
    config = tiny_config(
        workspace,
        "ahead",
        train={"total_steps": ASYNC_STEPS},
        rollout={"max_policy_lag": 2, "max_new_tokens": 40},
        # Sampling takes longer than training: each publish meets completions in flight.
        engine={"vllm": {"max_num_seqs": 4}},
    )
    with Attempt.in_cluster(cluster, config, PAUSING) as attempt:
        attempt.wait_for_step(2)
        attempt.process.send_signal(signal.SIGTERM)
        assert attempt.wait() == EXIT_RESUMABLE, attempt.text
    step = stopped_at(attempt.run_dir)
    assert f"Stopping after step {step}: signal SIGTERM." in attempt.text

    with Attempt.in_cluster(cluster, config) as resumed:
        run_dir = resumed.wait_to_end()
    assert f"Resuming after step {step} of {ASYNC_STEPS}." in resumed.text
    verdict = check_ledger(run_dir)
    assert verdict.is_sound, verdict
    assert (verdict.steps, verdict.ordinals) == (ASYNC_STEPS, ASYNC_STEPS * 6)
    metrics = metrics_of(run_dir)
    assert list(metrics) == list(range(1, ASYNC_STEPS + 1))
    lags = [values["lag/max"] for values in metrics.values()]
    assert 1 <= max(lags) <= 2
    assert min(lags) == 0, "the first step of an attempt is on-policy"
    # Weights change in flight: a completion's mean version is no whole number where two policies sampled it.
    totals = [values["lag/mean"] * NUM_ROLLOUTS for values in metrics.values()]
    assert any(abs(total - round(total)) > 1e-6 for total in totals)


def test_engines_that_fail_are_replaced_and_the_run_goes_on(workspace: Path, cluster: dict[str, str]) -> None:
    """One raises over its requests, one dies over a publish; all else is kept."""
    config = tiny_config(workspace, "mortal", engine={"engines_per_node": 2}, train={"total_steps": 6})
    with Attempt.in_cluster(cluster, config, str(HERE / "mortal_driver.py")) as attempt:
        run_dir = attempt.wait_to_end()
    ends = [line.split(maxsplit=4)[4] for line in attempt.text.splitlines() if "; starting another" in line]
    raised, died = ends
    assert raised.startswith("raised RuntimeError: CUDA error: an illegal memory access")
    assert died.startswith("died;")
    assert {path.name for path in run_dir.path.glob("failed-*")} == {"failed-raising", "failed-receiving"}
    verdict = check_ledger(run_dir)
    assert verdict.is_sound, verdict
    assert (verdict.steps, verdict.undone) == (6, 0)
    assert {values["lag/max"] for values in metrics_of(run_dir).values()} == {0}
    # What a replaced engine samples with is what the learner has.
    assert max(values["mismatch/logprob_abs_diff_max"] for values in metrics_of(run_dir).values()) <= TOLERANCE


@pytest.mark.long
def test_an_engine_that_dies_ahead_is_asked_again_for_all_steps_at_once(
    workspace: Path, cluster: dict[str, str]
) -> None:
    """Groups of three steps are with the engine when it dies; the driver waits for those of the first."""
    config = tiny_config(workspace, "dying-ahead", rollout={"max_policy_lag": 2}, train={"total_steps": 4})
    with Attempt.in_cluster(cluster, config, str(HERE / "dying_ahead_driver.py")) as attempt:
        run_dir = attempt.wait_to_end()
    calls = [(line["engine"], line["ordinals"]) for line in read_jsonl(run_dir.path / "asked.jsonl")]
    dead = calls[0][0]
    assert sorted(number for engine, ordinals in calls if engine == dead for number in ordinals) == list(range(18))
    again = next(ordinals for engine, ordinals in calls if engine != dead)
    assert again == list(range(18)), "in one call, in the order of before"
    verdict = check_ledger(run_dir)
    assert verdict.is_sound, verdict
    assert (verdict.steps, verdict.undone) == (4, 0)


@pytest.mark.long
def test_an_engine_that_fails_too_often_ends_the_driver(workspace: Path, cluster: dict[str, str]) -> None:
    config = tiny_config(workspace, "frail", train={"total_steps": 6})
    with Attempt.in_cluster(cluster, config, str(HERE / "mortal_driver.py")) as attempt:
        assert attempt.wait() == EXIT_CRASH
    (error,) = [line for line in attempt.text.splitlines() if line.startswith("error: ")]
    assert "raised RuntimeError: CUDA error" in error
    assert "after 3 restarts" in error
