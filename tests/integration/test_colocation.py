"""Learner and engine in turn on one device, on CPU: vLLM sleeps and wakes by the same calls as on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from tests.integration.training_runs import LETTERS, Attempt, tiny_config

pytestmark = [pytest.mark.integration, pytest.mark.long]


def test_a_run_whose_engine_sleeps_while_it_trains_is_bit_identical_to_one_whose_engine_does_not(
    workspace: Path, cluster: dict[str, str], untied_run: RunDir
) -> None:
    config = tiny_config(
        workspace,
        "colocated",
        "untied",
        placement={"colocate": True},
        train={"total_steps": 8, "num_minibatches": 2, "lr": 2e-3},
        eval={"every": 4, "num_samples": 3, "reward": LETTERS, "solved_at": 0.25},
        checkpoint={"every": None},
    )
    with Attempt.in_cluster(cluster, config) as attempt:
        attempt.wait_to_end()
    run = attempt.run_dir
    for step in range(8):
        assert list(read_jsonl(run.rollouts(step + 1))) == list(read_jsonl(untied_run.rollouts(step + 1)))
    ours, theirs = (load_file(each.latest_export() / "model.safetensors") for each in (run, untied_run))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert check_ledger(run).is_sound
