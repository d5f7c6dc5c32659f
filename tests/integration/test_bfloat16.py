"""bfloat16, which is what runs on GPUs use: learner and engine stay one model, and a resume changes no bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from hpc_grpo.config import Config
from hpc_grpo.weights.contract import DENSE_ARCHITECTURES
from tests.integration.learner_processes import make_config, make_step, run_ranks
from tests.integration.learner_resume import STAGES, resume
from tests.integration.precision import KL_BOUND, Precision, bfloat16_config, measure
from tests.integration.training_runs import HERE, Attempt, complete_in_cluster, differing_weights, metrics_of

pytestmark = pytest.mark.integration

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
IN_FEW_ROWS = {"max_tokens_per_microbatch": 128}
"""Each length of a row costs a CPU without instructions for bfloat16 more than its tokens do."""
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e6},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 5e5,
    },
}


BIASED_EXPERTS: tuple[str, dict[str, Any]] = (
    "glm4_moe",
    {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 0},
)


def in_bfloat16(config: Config) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})


def rounded_buffers(rank: int, world_size: int, store: Any, root: Path) -> dict[str, list[str]]:
    """Name the buffers under ZeRO-3 that are not, bit for bit, those of an ordinary load.

    Of learner, reference and, for experts that are chosen with a bias, of the export.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from hpc_grpo.learner.checkpoint import export_model
    from hpc_grpo.learner.learner import Learner

    def ordinary_load(path: Path) -> dict[str, torch.Tensor]:
        return dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).named_buffers())

    ropes = itertools.product(DENSE_ARCHITECTURES, ROPES)
    kinds = {f"{kind}-{rope}": (kind, {"rope_parameters": {"rope_type": rope, **ROPES[rope]}}) for kind, rope in ropes}
    different: dict[str, list[str]] = {}
    for name, (kind, settings) in {**kinds, "biased experts": BIASED_EXPERTS}.items():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **settings))
        biases = [buffer for own, buffer in model.named_buffers() if own.endswith("e_score_correction_bias")]
        for bias in biases:
            bias.copy_(8.0 + 0.02 * torch.randn_like(bias))
        model.save_pretrained(root / name)
        ordinary = ordinary_load(root / name)
        assert ordinary, "no buffers to compare"
        learner = Learner(in_bfloat16(make_config(root / name, root, zero_stage=3)), rank, world_size, store)
        owners = {"learner": learner.model, "reference": learner.parts[0].model}
        found = {owner: dict(model.language_model.named_buffers()) for owner, model in owners.items()}
        if biases:
            export_model(learner, root / "export")
            found["export"] = ordinary_load(root / "export")
        different[name] = [
            f"{owner}: {own} {buffer.dtype}"
            for owner, buffers in found.items()
            for own, buffer in buffers.items()
            if buffer.dtype != ordinary[own].dtype or not torch.equal(buffer, ordinary[own])
        ]
    return different


def test_zero_3_leaves_the_buffers_of_every_architecture_as_an_ordinary_load_has_them(tmp_path: Path) -> None:
    (different,) = run_ranks(1, rounded_buffers, tmp_path)
    assert {name: buffers for name, buffers in different.items() if buffers} == {}


def resume_all_stages(rank: int, world_size: int, store: Any, model: Path, root: Path) -> dict[int, Any]:
    """Under each ZeRO stage: a step, a checkpoint, and two more steps, straight on and from the checkpoint."""
    from hpc_grpo.learner.learner import Learner

    resumed = {}
    for stage in STAGES:
        config = in_bfloat16(make_config(model, root, zero_stage=stage, **IN_FEW_ROWS))
        learner = Learner(config, rank, world_size, store)
        learner.train_step(make_step(1, rank, world_size))
        resumed[stage] = resume(learner, config, rank, world_size, root)
    return resumed


def test_learners_resume_in_bfloat16_bit_for_bit_under_every_stage(workspace: Path, tmp_path: Path) -> None:
    """ZeRO-1 has an optimizer of its own for bfloat16, DeepSpeed's BF16_Optimizer."""
    (stages,) = run_ranks(1, resume_all_stages, workspace / "tied", tmp_path)
    for stage, resumed in stages.items():
        (straight, expected), (again, weights) = resumed["straight"], resumed["again"]
        assert straight == again, stage
        assert [name for name in expected if not np.array_equal(weights[name], expected[name])] == [], stage


def test_a_bfloat16_run_trains_and_resumes_where_engines_keep_biases_in_float32(
    workspace: Path, cluster: dict[str, str]
) -> None:
    """ZeRO-3 with gradient checkpointing, killed in the middle: steps trained again have each number they had before.

    What is sampled, its rewards and the gradients agree to the bit only where the weights do.
    """
    precision, driver = Precision(zero_stage=3, gradient_checkpointing=True), str(HERE / "amx_driver.py")
    config = bfloat16_config(workspace, "bfloat16-killed", precision, steps=8)
    values = yaml.safe_load(config.read_text())
    changes = {"checkpoint": {"every": 4}, "rollout": {**values["rollout"], "max_new_tokens": 8}}
    config.write_text(yaml.safe_dump({**values, **changes}))
    with Attempt.in_cluster(cluster, config, driver) as killed:
        killed.wait_until(lambda: 6 in metrics_of(killed.run_dir), "step 6")
        killed.process.kill()
        killed.wait()
    straight = metrics_of(killed.run_dir)
    with Attempt.in_cluster(cluster, config, driver) as resumed:
        run_dir = resumed.wait_to_end()
    assert "Resuming after step 4 of 8." in resumed.text
    assert "grad_norm" in straight[5]
    again = metrics_of(run_dir)
    for step in (5, 6):
        assert numbers(again[step]) == numbers(straight[step])
    assert measure(run_dir).largest_kl < KL_BOUND


def numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return what a step computed, without what tells of time, machine and attempt."""
    computed = ("reward/", "loss/", "mismatch/", "tokens/", "policy/", "grad_norm")
    return {name: value for name, value in metrics.items() if name.startswith(computed)}


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fifty_steps_in_bfloat16_stay_one_model_and_a_resume_changes_no_bit(
    stage: int, checkpointing: bool, workspace: Path, cluster: dict[str, str]
) -> None:
    precision = Precision(stage, checkpointing)
    run_dir = complete_in_cluster(cluster, bfloat16_config(workspace, f"{precision}-whole", precision, steps=50))
    report = measure(run_dir)
    print(precision, report)
    assert report.steps == 50
    assert report.largest_kl < KL_BOUND
    config = bfloat16_config(workspace, f"{precision}-killed", precision, steps=50)
    with Attempt.in_cluster(cluster, config) as killed:
        killed.wait_for_step(27)
        killed.process.kill()
        killed.wait()
    assert differing_weights(complete_in_cluster(cluster, config), run_dir) == []
