"""Weights arrive at the engines as the learner has them, or the run stops and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.errors import EXIT_CRASH
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from tests.integration.corrupting_driver import CORRUPTED_VERSION
from tests.integration.mismatch import TOLERANCE, measure
from tests.integration.stale_driver import STALE_FROM
from tests.integration.training_runs import HERE, Attempt, metrics_of, tiny_config

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


def test_corrupted_bucket_stops_the_run_with_the_engines_words(corrupted_untied: tuple[Attempt, Attempt]) -> None:
    text = corrupted_untied[0].text
    (message,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert message.startswith(
        f"error: Publishing weight version {CORRUPTED_VERSION} failed: "
        f"checksum mismatch in bucket 0 of weight version {CORRUPTED_VERSION} (model.embed_tokens.weight … "
    )
    assert "announced 0x" in message
    assert "Traceback" not in text


def test_nothing_is_trained_on_corrupted_weights(corrupted_untied: tuple[Attempt, Attempt]) -> None:
    """Two optimizer steps a step: version 2 is what the first step gives, so no step was finished."""
    corrupted, completed = corrupted_untied
    assert [line["attempt"] for line in read_jsonl(completed.run_dir.ledger)] == [completed.number] * 8
    assert check_ledger(corrupted.run_dir).is_sound


def test_an_engine_that_keeps_its_old_weights_ends_the_run_within_one_publish(
    cluster: dict[str, str], workspace: Path
) -> None:
    engine = {"engines_per_node": 2}
    config = tiny_config(workspace, "stale", "untied", train={"total_steps": 4, "lr": 1e-4}, engine=engine)
    with Attempt.in_cluster(cluster, config, str(HERE / "stale_driver.py")) as stale:
        assert stale.wait() == EXIT_CRASH, stale.text
    (message,) = [line for line in stale.text.splitlines() if line.startswith("error: ")]
    assert message.startswith(f"error: An engine keeps old weights after the publish of version {STALE_FROM}: ")
    assert list(metrics_of(stale.run_dir)) == list(range(1, STALE_FROM))
