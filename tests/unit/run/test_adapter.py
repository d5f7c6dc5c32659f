"""What is refused of section lora and of adapters, on a login node and before a run starts."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from hpc_grpo.config import load_config
from hpc_grpo.config.load import load_values
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.adapter import is_adapter, refuse_wrong_lora, with_model
from hpc_grpo.run.evals import eval_config
from hpc_grpo.run.paths import RunDir
from tests.support.configs import minimal_config

LEAST = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"train": {"path": "d"}}, "train": {"total_steps": 1}}
ADAPTER: dict[str, Any] = {
    "peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["o_proj", "q_proj"],
    "base_model_name_or_path": "/models/small", "bias": "none", "use_dora": False,
}  # fmt: skip

PATHS = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"]
"""As peft writes all-linear."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The header of a model's weights, without the weights."""
    names = ("model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj", "lm_head")
    entries = {f"{name}.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} for name in names}
    text = json.dumps(entries).encode()
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return tmp_path / "small"


def adapter_in(folder: Path, **changes: Any) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER, **changes}))
    return str(folder)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"lora": {"rank": 0}}, r"lora.rank = 0"),
        ({"lora": {"rank": 513}}, r"lora.rank = 513"),
        ({"lora": {"targets": []}}, r"lora.targets = \[\] must be all-linear, or names of linear layers"),
        ({"lora": {"targets": ["q_proj", "lm_head"]}}, r"without embed_tokens, lm_head: vLLM's logprobs"),
        ({"lora": {"targets": ["self_attn.q_proj"]}}, r"'self_attn.q_proj', the path of a layer.* write 'q_proj'"),
        ({"lora": {"targets": "q_proj"}}, r"lora.targets = 'q_proj': must be all-linear, or a list such as \[q_proj"),
        ({"lora": {"alpha": float("inf")}}, r"lora.alpha = inf: "),
        ({"train": {"total_steps": 1, "lr": float("nan")}}, r"train.lr = nan: "),
        ({"lora": {"dropout": 0.1}}, r"lora.dropout = 0.1 would make the policy ratios .* Set lora.dropout=0"),
        ({"model": {"path": "m", "adapter": "a"}}, r"model.adapter = a needs section lora"),
        ({"lora": {"publish": "whole"}}, r"lora.publish = 'whole'.*merged"),
        ({"lora": {"publish": "merged"}, "task": "sft"}, r"lora.publish: task = sft has no such key"),
    ],
)
def test_a_wrong_section_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_values({**LEAST, **sections}, [], "test")


def test_dropout_is_for_sft() -> None:
    config = load_values({**LEAST, "task": "sft", "lora": {"dropout": 0.1}}, [], "test")
    assert config.lora is not None
    assert config.lora.dropout == 0.1


@pytest.mark.parametrize(
    ("lora", "adapter", "says"),
    [
        ({"targets": ["q_prj"]}, None, r"'q_prj', which is no linear layer of model.path .*q_proj.*o_proj, q_proj"),
        ({"rank": 8}, {}, r"lora.rank = 8, but model.adapter = .* has 16. Set lora.rank=16"),
        ({"alpha": 16}, {}, r"lora.alpha = 16.0, but .* has 32.0"),
        ({"targets": ["q_proj"]}, {}, r"lora.targets = \['q_proj'\], but .* has \['o_proj', 'q_proj'\]"),
        ({}, {"base_model_name_or_path": "/models/other"}, r"is an adapter of /models/other, and model.path = .*small"),
        ({"targets": ["q_proj"]}, {"target_modules": PATHS}, r"Set lora.targets=\['o_proj', 'q_proj'\]"),
        ({}, {"target_modules": ".*_proj"}, r"target_modules = '.\*_proj' is a pattern"),
        ({}, {"use_dora": True}, r"use_dora = True is not supported"),
        ({}, {"peft_type": "IA3"}, r"peft_type = 'IA3' is not supported"),
        ({}, {"init_lora_weights": "pissa_niter_4"}, r"init_lora_weights = 'pissa_niter_4' is not supported"),
        ({}, {"layer_replication": [[0, 1], [0, 1]]}, r"layer_replication = .* is not supported"),
        ({}, {"lora_bias": True}, r"lora_bias = True is not supported"),
        ({}, {"base_model_name_or_path": None}, r"names no base. Set its base_model_name_or_path"),
        ({}, {"r": "many"}, r"cannot be read as the settings of a LoRA adapter"),
    ],
)
def test_targets_and_adapters_that_do_not_fit_the_model_are_refused(
    model: Path, lora: dict[str, Any], adapter: dict[str, Any] | None, says: str
) -> None:
    path = None if adapter is None else adapter_in(model.parent / "adapter", **adapter)
    config = minimal_config(model={"path": str(model), "adapter": path}, lora=lora)
    with pytest.raises(ConfigError, match=says):
        refuse_wrong_lora(config, model)


@pytest.mark.parametrize(
    "settings", [{}, {"target_modules": PATHS}, {"init_lora_weights": "gaussian", "layer_replication": None}]
)
def test_an_adapter_of_the_model_is_taken(model: Path, settings: dict[str, Any]) -> None:
    path = adapter_in(model.parent / "adapter", **settings)
    config = minimal_config(model={"path": str(model), "adapter": path}, lora={})
    weights = Path(path) / "adapter_model.safetensors"
    for content, says in (None, "is missing or empty"), (b"", "its header cannot be read"), (save({}), "or empty"):
        if content is not None:
            weights.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"adapter_model.safetensors.*{says}"):
            refuse_wrong_lora(config, model)
    weights.write_bytes(save({"base_model.model.q_proj.lora_A.weight": np.zeros((2, 2))}))
    refuse_wrong_lora(config, model)


def test_engines_that_sleep_cannot_keep_the_base(model: Path) -> None:
    config = minimal_config(model={"path": str(model)}, lora={"publish": "adapter"}, placement={"colocate": True})
    with pytest.raises(ConfigError, match=r"Set lora\.publish=merged"):
        refuse_wrong_lora(config, model)


def test_an_export_of_an_adapter_is_evaluated_on_its_base_and_a_model_without_adapter(tmp_path: Path) -> None:
    config, path = minimal_config(lora={"rank": 8}), adapter_in(tmp_path / "adapter")
    assert is_adapter(path)
    evaluated = with_model(config, path)
    assert (evaluated.model.path, evaluated.model.adapter) == ("/models/small", path)
    assert evaluated.publishes_adapter
    assert with_model(config, "m").lora is None


@pytest.mark.parametrize("task", ["grpo", "sft"])
def test_the_engines_of_an_eval_and_of_a_server_sample_from_the_adapter(tmp_path: Path, task: str) -> None:
    config, path = minimal_config(task=task, lora={}), adapter_in(tmp_path / "adapter")
    evaluated = eval_config(config, RunDir(tmp_path / "eval"), path, [{"path": "/d.jsonl"}])
    assert evaluated.model.adapter == path
    assert evaluated.publishes_adapter


def test_the_shipped_config_trains_an_adapter() -> None:
    config = load_config("local/lora")
    assert config.lora is not None
    assert config.train.lr == pytest.approx(10 * load_config("local/demo").train.lr)
