from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.plan.model import count_parameters, read_model

QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 10,
}


def write_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in {**QWEN, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def write_safetensors(path: Path, **shapes: list[int]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_headers_of_all_files_are_added_up(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", x=[3, 4], scalar=[])
    write_safetensors(tmp_path / "b.safetensors", y=[5])
    index = {"weight_map": {"x": "a.safetensors", "scalar": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert count_parameters(tmp_path, is_tied=False) == 12 + 1 + 5
    (tmp_path / "b.safetensors").unlink()
    assert count_parameters(tmp_path, is_tied=False) is None


def test_a_tied_output_layer_that_is_stored_twice_counts_once(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "model.safetensors", **{"model.embed_tokens.weight": [10, 8], "lm_head.weight": [10, 8]}
    )
    assert count_parameters(tmp_path, is_tied=True) == 80
    assert count_parameters(tmp_path, is_tied=False) == 160


def test_without_weights_the_formula_counts(tmp_path: Path) -> None:
    model = read_model(str(write_config(tmp_path)), {})
    assert model.counted_from == "formula on config.json"
    assert model.num_parameters == 2 * 80 + (72 + 72 + 64 + 384 + 16) + 8


def test_biases_follow_the_model_type(tmp_path: Path) -> None:
    llama = read_model(str(write_config(tmp_path / "llama", model_type="llama")), {}).shape
    assert not llama.has_qkv_bias
    with_bias = read_model(str(write_config(tmp_path / "bias", model_type="llama", attention_bias=True)), {}).shape
    assert with_bias.has_qkv_bias
    assert with_bias.has_output_bias
    assert read_model(str(write_config(tmp_path / "qwen3", model_type="qwen3", head_dim=16)), {}).shape.kv_size == 16


def test_a_model_that_is_not_here_is_said_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_model("org/absent", {"HF_HOME": str(tmp_path)})
    message = str(caught.value)
    assert "org/absent is not on this machine" in message
    assert str(tmp_path / "hub") in message
    assert "hf download org/absent" in message
    assert "--size" in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_experts": 8}, "dense decoder models only (num_experts = 8)"),
        ({"hidden_size": None}, "its config.json has no hidden_size"),
        ({"model_type": "gemma3_text"}, "no formula is known for model_type = 'gemma3_text'"),
    ],
)
def test_what_the_formulas_do_not_describe_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_model(str(write_config(tmp_path, **changes)), {})
    assert reason in str(caught.value)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{broken}")
    with pytest.raises(ConfigError, match="is no safetensors file"):
        read_model(str(tmp_path), {})
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        read_model(str(tmp_path), {})
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_model(str(tmp_path), {})
