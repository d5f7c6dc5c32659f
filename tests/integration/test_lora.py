"""LoRA under real DeepSpeed, and in whole runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hpc_grpo.config.train import LoraConfig
from hpc_grpo.demo.model import write_model
from hpc_grpo.errors import EXIT_CRASH, EXIT_RESUMABLE
from hpc_grpo.metrics.reductions import merge
from hpc_grpo.run.paths import RunDir
from tests.integration.learner_processes import make_config, make_step, run_ranks, weights_of
from tests.integration.learner_resume import STAGES, resume
from tests.integration.naive_grpo import logprobs_of
from tests.integration.training_runs import (
    HERE,
    PAUSING,
    RUN_DEADLINE_S,
    Attempt,
    complete_in_cluster,
    metrics_of,
    tiny_config,
)
from tests.support.tiny_models import TINY

pytestmark = pytest.mark.integration

LORA = LoraConfig(rank=4, alpha=16.0)


def lora_config(model: Path, root: Path, dtype: str = "float32", **train: Any) -> Any:
    config = make_config(model, root, **train)
    return config.model_copy(update={"lora": LORA, "model": config.model.model_copy(update={"dtype": dtype})})


def train_adapters(rank: int, world_size: int, store: Any, model: Path, root: Path) -> dict[Any, Any]:
    """Three steps under each ZeRO stage, saved and gone on with; in bfloat16 two steps."""
    from hpc_grpo.learner.checkpoint import export_model
    from hpc_grpo.learner.learner import Learner, score_apart
    from hpc_grpo.learner.lora import adapter_off

    results: dict[Any, Any] = {}
    for stage in STAGES:
        config = lora_config(model, root, zero_stage=stage)
        learner = Learner(config, rank, world_size, store)
        before = weights_of(learner)
        metrics = [learner.train_step(make_step(seed, rank, world_size)) for seed in (1, 2, 3)]
        export_model(learner, root / f"merged_{world_size}_{stage}", merged=True)
        sequence = make_step(1, 0, 1)[0].sequences[0]
        prompt, completion = sequence.token_ids[~sequence.loss_mask], sequence.token_ids[sequence.loss_mask]
        said = score_apart(learner.model, prompt.tolist(), [completion.tolist()], "cpu")[0]
        with adapter_off(learner.model):
            base = score_apart(learner.model, prompt.tolist(), [completion.tolist()], "cpu")[0]
        results[stage] = {"before": before, "metrics": metrics, "weights": weights_of(learner), "said": (said, base)}
        results[stage]["resumed"] = resume(learner, config, rank, world_size, root)
        half = lora_config(model, root, "bfloat16", zero_stage=stage)
        learner = Learner(half, rank, world_size)
        before = weights_of(learner)
        metrics = [learner.train_step(make_step(seed, rank, world_size)) for seed in (1, 2)]
        results["bfloat16", stage] = {"before": before, "metrics": metrics, "weights": weights_of(learner)}
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_model(folder / "model", TINY, seed=0)
    return folder


@pytest.fixture(scope="module")
def alone(root: Path) -> dict[Any, Any]:
    return run_ranks(1, train_adapters, root / "model", root)[0]


@pytest.fixture(scope="module")
def together(root: Path, alone: Any) -> list[dict[Any, Any]]:
    return run_ranks(2, train_adapters, root / "model", root)


@pytest.mark.parametrize("stage", STAGES)
def test_only_linear_layers_move_and_ranks_train_like_one(stage: int, alone: Any, together: Any) -> None:
    for result in (alone[stage], *(rank[stage] for rank in together)):
        moved = {name for name, own in result["before"].items() if not np.array_equal(own, result["weights"][name])}
        assert moved == {name for name in result["before"] if name.endswith("_proj.weight")}
        for name, expected in alone[1]["weights"].items():
            np.testing.assert_allclose(result["weights"][name], expected, atol=5e-6, err_msg=name)


@pytest.mark.parametrize("stage", STAGES)
def test_adapter_scores_as_the_merged_export_and_without_it_as_the_base(
    stage: int, alone: Any, together: Any, root: Path
) -> None:
    config = lora_config(root / "model", root)
    sequence = make_step(1, 0, 1)[0].sequences[0]
    for world_size, result in ((1, alone[stage]), (2, together[0][stage])):
        models = (root / f"merged_{world_size}_{stage}", root / "model")
        for said, folder in zip(result["said"], models, strict=True):
            with torch.no_grad():
                plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
                expected = logprobs_of(plain, sequence, config).numpy()
            np.testing.assert_allclose(said, expected, atol=2e-5)
        assert np.abs(np.subtract(*result["said"])).max() > 1e-3


@pytest.mark.parametrize("stage", STAGES)
def test_reference_is_the_base(stage: int, alone: Any, together: Any) -> None:
    for result in ([alone[stage]], [rank[stage] for rank in together]):
        kls = [merge([own["metrics"][step] for own in result])["kl/learner_ref"] for step in range(3)]
        assert kls[0] == pytest.approx(0.0, abs=1e-7)
        assert kls[2] > 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_holds_the_adapter_alone_and_resumes_on_any_number_of_learners(
    stage: int, alone: Any, together: Any, root: Path
) -> None:
    for result in (alone, *together):
        resumed = result[stage]["resumed"]
        for (_, straight), (_, again) in [(resumed["straight"], resumed["again"])]:
            assert all(np.array_equal(straight[name], again[name]) for name in straight)
        if resumed["resharded"] is not None:
            for name, expected in resumed["straight"][1].items():
                np.testing.assert_allclose(resumed["resharded"]["weights"][name], expected, atol=5e-6, err_msg=name)
    files = [file for file in (root / f"1_ranks/stage_{stage}/checkpoints").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < (root / "model" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_trains_the_adapter_alone(stage: int, alone: Any, together: Any) -> None:
    for result in (alone, *together):
        own = result["bfloat16", stage]
        moved = {name for name in own["before"] if not np.array_equal(own["before"][name], own["weights"][name])}
        assert moved == {name for name in own["before"] if name.endswith("_proj.weight")}


def config_of(workspace: Path, name: str, publish: str, **train: Any) -> Path:
    return tiny_config(
        workspace, f"lora-{name}", train={"total_steps": 4, **train}, lora={"rank": 4, "alpha": 16, "publish": publish}
    )


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("withheld", "keeps old weights"),
        pytest.param("stale", "keeps old weights", marks=pytest.mark.long),
        ("half", "does not sample from weight version"),
    ],
)
def test_canary_ends_a_run_whose_engine_holds_another_adapter_within_one_publish(
    cluster: dict[str, str], workspace: Path, fault: str, says: str
) -> None:
    config = config_of(workspace, fault, "adapter", lr=1e-3)
    with Attempt.in_cluster(cluster, config, str(HERE / "lora_driver.py")) as attempt:
        assert attempt.wait() == EXIT_CRASH, attempt.text
    (message,) = [line for line in attempt.text.splitlines() if line.startswith("error: ")]
    assert says in message
    assert "version 1" in message


@pytest.fixture(scope="module")
def adapter_run(cluster: dict[str, str], workspace: Path) -> RunDir:
    """Stopped after its second step, and resumed."""
    config = config_of(workspace, "adapter", "adapter")
    with Attempt.in_cluster(cluster, config, PAUSING) as stopped:
        stopped.wait_for_step(2)
        stopped.run_dir.stop_marker.touch()
        assert stopped.wait() == EXIT_RESUMABLE, stopped.text
    stopped.run_dir.stop_marker.unlink()
    return complete_in_cluster(cluster, config)


def test_a_resumed_run_that_publishes_adapters_samples_what_one_with_merged_weights_does(
    cluster: dict[str, str], workspace: Path, adapter_run: RunDir
) -> None:
    merged = metrics_of(complete_in_cluster(cluster, config_of(workspace, "merged", "merged")))
    for step, own in metrics_of(adapter_run).items():
        assert own["mismatch/logprob_abs_diff_max"] < 1e-4
        assert own["reward/mean"] == pytest.approx(merged[step]["reward/mean"], rel=1e-4)


def test_an_export_is_pefts_and_merges_to_what_the_learner_had(adapter_run: RunDir, workspace: Path) -> None:
    from peft import PeftModel

    folder = adapter_run.latest_export()
    assert folder is not None
    base = AutoModelForCausalLM.from_pretrained(workspace / "tied", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, folder).merge_and_unload().state_dict()
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(workspace / "tied")
    words = [sys.executable, "-m", "hpc_grpo.cli", "export", str(adapter_run.path), "--merged"]
    subprocess.run(words, check=True, timeout=RUN_DEADLINE_S)
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, own in merged.items():
        torch.testing.assert_close(own, loaded[name], atol=1e-6, rtol=0.0)
