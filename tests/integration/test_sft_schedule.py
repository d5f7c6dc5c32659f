"""The learning rate of a supervised fine-tuning whose steps have several optimizer steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.run.progress import read_metrics
from tests.integration.training_runs import Attempt, tiny_config

pytestmark = pytest.mark.integration

STEPS, MINIBATCHES, PEAK = 5, 4, 1e-2


def test_it_ends_where_the_schedule_does(workspace: Path, cluster: dict[str, str]) -> None:
    config = tiny_config(
        workspace,
        "sft-schedule",
        task={"name": "sft", "args": {"batch_size": 8}},
        data={"train": {"path": str(workspace / "sft.jsonl")}},
        train={"total_steps": STEPS, "num_minibatches": MINIBATCHES, "lr": PEAK, "schedule": "linear"},
        checkpoint={"every": None},
    )
    with Attempt.in_cluster(cluster, config) as attempt:
        run = attempt.wait_to_end()
    rates = [metrics["lr"] for _, metrics in sorted(read_metrics(run.metrics).items())]
    # Of optimizer step i of N = 20 the rate is PEAK * (1 - i / N); a step's metric is the mean of its four.
    expected = [PEAK * (1 - (MINIBATCHES * step + 1.5) / (STEPS * MINIBATCHES)) for step in range(STEPS)]
    assert rates == pytest.approx(expected)
