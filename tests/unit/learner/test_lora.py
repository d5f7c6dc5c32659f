"""Adapters in the policy, without DeepSpeed: what they add, how they merge, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.lora import Lora, adapted_layers, adapter_off, write_adapter
from hpc_grpo.learner.model import (
    PolicyModel,
    adapter_parameters,
    check_packing,
    gathered,
    load_policy,
    parameter_specs,
    score,
)
from hpc_grpo.learner.packing import pack
from tests.support.configs import minimal_config
from tests.support.sequences import ordinary_sequence
from tests.support.tiny_models import HEADS, SHAPE, TOKENS, VOCABULARY

BATCH = pack([ordinary_sequence(0, 0, np.random.default_rng(0).integers(2, VOCABULARY, 20), 12)])


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    kind, settings = (Qwen2ForCausalLM, Qwen2Config) if request.param else (LlamaForCausalLM, LlamaConfig)
    kind(settings(**SHAPE, **HEADS, **TOKENS, tie_word_embeddings=request.param)).save_pretrained(folder)
    return folder


def config_of(model: Path, dtype: str = "float32", adapter: Path | None = None, **lora: Any) -> Any:
    path = None if adapter is None else str(adapter)
    return minimal_config(
        model={"path": str(model), "dtype": dtype, "device": "cpu", "adapter": path},
        data={"max_prompt_tokens": 32},
        rollout={"max_new_tokens": 32},
        lora={"rank": 4, **lora},
    )


def adapted(config: Any, *, trained: bool = True) -> PolicyModel:
    """The policy with an adapter, whose B is as after training."""
    policy = load_policy(config, use_gradient_checkpointing=False)
    Lora(config, 1, torch.device("cpu")).change_policy(policy)
    torch.manual_seed(1)
    for name, own in adapter_parameters(policy).items():
        if trained and "lora_B" in name:
            own.data.normal_(std=0.05)
    return policy


def test_merged_weights_compute_what_the_adapter_does_and_it_can_be_off(model: Path) -> None:
    config = config_of(model)
    policy, base = adapted(config), load_policy(config, use_gradient_checkpointing=False)
    names = [spec.name for spec in parameter_specs(policy, "float32")]
    assert names == [name for name, _ in base.hf_named_parameters()]
    with gathered(policy, names) as weights:
        merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        merged.load_state_dict(weights, strict=False)
    with adapter_off(policy):
        torch.testing.assert_close(score(policy, BATCH), score(base, BATCH), atol=0.0, rtol=0.0)
    moved = (score(policy, BATCH) - score(base, BATCH)).abs().max()
    base.language_model.load_state_dict(merged.state_dict(), strict=False)
    torch.testing.assert_close(score(policy, BATCH), score(base, BATCH), atol=1e-5, rtol=0.0)
    assert moved > 1e-2


def test_a_small_product_is_not_lost_in_bfloat16_before_the_cast(model: Path) -> None:
    """Sums are float32, whatever the model's type: the store or the export rounds them once."""
    policy = adapted(config_of(model, "bfloat16"))
    name, layer = next(adapted_layers(policy))
    with gathered(policy, [f"{name}.weight"]) as weights:
        merged = weights[f"{name}.weight"]
    low, high = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
    exact = layer.base_layer.weight.double() + layer.scaling["default"] * (high @ low)
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged.double(), exact, atol=1e-6, rtol=1e-6)


def test_names_of_an_adapter_give_its_live_parameters(model: Path) -> None:
    policy = adapted(config_of(model))
    specs, own = parameter_specs(policy, "float32", of_adapter=True), adapter_parameters(policy)
    assert all(spec.name.startswith("base_model.model.model.layers.") for spec in specs)
    with gathered(policy, [spec.name for spec in specs]) as weights:
        assert {name: each.data_ptr() for name, each in weights.items()} == {
            name: each.data_ptr() for name, each in own.items()
        }


def test_only_the_adapter_is_trained_and_it_begins_as_nothing(model: Path) -> None:
    config = config_of(model, targets=["q_proj", "down_proj"])
    policy, base = adapted(config, trained=False), load_policy(config, use_gradient_checkpointing=False)
    trained = {name for name, own in policy.named_parameters() if own.requires_grad}
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in trained} == {"q_proj", "down_proj"}
    torch.testing.assert_close(score(policy, BATCH), score(base, BATCH), atol=0.0, rtol=0.0)
    again = adapted(config, trained=False)
    for name, own in adapter_parameters(policy).items():
        torch.testing.assert_close(own, adapter_parameters(again)[name], atol=0.0, rtol=0.0)


def test_an_adapter_that_was_written_is_where_another_run_begins(model: Path, tmp_path: Path) -> None:
    policy = adapted(config_of(model))
    write_adapter(config_of(model), {name: own.detach() for name, own in adapter_parameters(policy).items()}, tmp_path)
    again = adapted(config_of(model, adapter=tmp_path), trained=False)
    torch.testing.assert_close(score(again, BATCH), score(policy, BATCH), atol=0.0, rtol=0.0)
    with pytest.raises(ConfigError, match=r"does not fit section lora and model.path: .* has shape \(4, .*\(8, "):
        adapted(config_of(model, adapter=tmp_path, rank=8), trained=False)


def test_the_dropout_of_a_trained_adapter_is_not_taken_for_mixed_sequences(model: Path) -> None:
    policy = adapted(config_of(model, dropout=0.5))
    for name, own in adapter_parameters(policy).items():
        if "lora_B" in name:
            own.data.mul_(20.0)
    check_packing(policy, "model.path", "cpu")
    dropouts = [own for own in policy.modules() if isinstance(own, torch.nn.Dropout) and own.p]
    assert dropouts
    assert all(own.training for own in dropouts)


def test_targets_that_match_nothing_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora.targets = \['q_prj'\]: Target modules"):
        adapted(config_of(model, targets=["q_prj"]))
