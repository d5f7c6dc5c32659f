"""Weights arrive at the engines as the learner has them, or the run stops and says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from corrupting_driver import CORRUPTED_VERSION
from mismatch import TOLERANCE, measure
from training_runs import Attempt, metrics_of

from hpc_grpo.errors import EXIT_CRASH
from hpc_grpo.run_dir import RunDir

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("embeddings", ["tied", "untied"])
def test_engines_have_the_learners_weights_at_every_step(
    embeddings: str, workspace: Path, sft_run: RunDir, sync_run: RunDir, untied_run: RunDir
) -> None:
    export = sft_run.latest_export()
    assert export is not None
    run, model = (sync_run, export) if embeddings == "tied" else (untied_run, workspace / "untied")
    report = measure(run, model)
    print(report)
    assert report.largest <= TOLERANCE
    assert report.moved > 0.01
    # An engine that missed a single update would be off by about this much divided by the steps.
    assert report.policy_drift > 100 * TOLERANCE * report.steps


def test_learning_rate_is_the_configured_one(untied_run: RunDir) -> None:
    assert {values["lr"] for values in metrics_of(untied_run).values()} == {2e-3}


def test_corrupted_bucket_stops_the_run_with_the_engines_words(corrupted: Attempt) -> None:
    assert corrupted.supervisor.returncode == EXIT_CRASH
    (message,) = [line for line in corrupted.text.splitlines() if line.startswith("error: ")]
    assert message.startswith(
        f"error: Publishing weight version {CORRUPTED_VERSION} failed: "
        f"checksum mismatch in bucket 0 of weight version {CORRUPTED_VERSION} (model.embed_tokens.weight … "
    )
    assert "announced 0x" in message
    assert "Traceback" not in corrupted.text


def test_nothing_is_trained_on_corrupted_weights(corrupted: Attempt) -> None:
    assert list(metrics_of(corrupted.run_dir)) == list(range(1, CORRUPTED_VERSION))
    assert not corrupted.run_dir.is_complete()
    assert corrupted.record()["exit_kind"] == "crash"
