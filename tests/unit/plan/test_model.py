"""Shapes and counts of models, against published numbers and files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.errors import ConfigError
from hpc_grpo.plan.model import FAMILY, ModelShape, count_parameters, read_model
from tests.support.tiny_models import write_family

LLAMA_3_8B = ModelShape(4096, 32, 32, 8, 128, 14_336, 128_256)
MISTRAL_7B = ModelShape(4096, 32, 32, 8, 128, 14_336, 32_000)
QWEN3_8B = ModelShape(4096, 36, 32, 8, 128, 12_288, 151_936, has_query_key_norm=True)
MIXTRAL_8X7B = ModelShape(4096, 32, 32, 8, 128, 14_336, 32_000, num_experts=8, experts_per_token=2)
QWEN3_30B_A3B = ModelShape(
    2048, 48, 32, 4, 128, 768, 151_936, has_query_key_norm=True, num_experts=128, experts_per_token=8
)


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        (FAMILY["0.5B"], 494_032_768),
        (FAMILY["1.5B"], 1_543_714_304),
        (FAMILY["3B"], 3_085_938_688),
        (FAMILY["7B"], 7_615_616_512),
        (FAMILY["14B"], 14_770_033_664),
        (FAMILY["32B"], 32_763_876_352),
        (FAMILY["72B"], 72_706_203_648),
        (LLAMA_3_8B, 8_030_261_248),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN3_8B, 8_190_735_360),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN3_30B_A3B, 30_532_122_624),
    ],
)
def test_the_formula_gives_the_published_counts(shape: ModelShape, published: int) -> None:
    assert shape.num_parameters == published


@pytest.mark.parametrize(
    ("shape", "active", "largest"),
    [
        (MIXTRAL_8X7B, 12.9, 8 * 2 * 14_336 * 4096),
        (QWEN3_30B_A3B, 3.3, 128 * 2 * 768 * 2048),
        (QWEN3_8B, 8.2, 151_936 * 4096),
    ],
)
def test_a_token_passes_through_its_own_experts_alone(shape: ModelShape, active: float, largest: int) -> None:
    assert (shape.num_parameters - shape.num_idle_parameters) / 1e9 == pytest.approx(active, abs=0.06)
    assert shape.largest_parameter == largest


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_mixture_of_experts_that_is_built_has_as_many(kind: str, tmp_path: Path) -> None:
    model = read_model(str(write_family(tmp_path, kind)), {})
    assert (model.shape.num_experts, model.shape.experts_per_token) == (4, 2)
    assert model.num_parameters == model.shape.num_parameters


def test_one_layer_by_hand() -> None:
    shape = ModelShape(8, 1, 2, 1, 4, 16, 10, has_qkv_bias=True)
    # q 8x8 + 8, k and v 8x4 + 4 each, o 8x8; gate, up, down 8x16 each; two norms of 8
    assert shape.num_layer_parameters == 72 + 2 * 36 + 64 + 3 * 128 + 16
    # embedding and output layer 10x8 each, last norm 8
    assert shape.num_parameters == 2 * 80 + shape.num_layer_parameters + 8
    assert replace(shape, has_tied_embeddings=True).num_parameters == shape.num_parameters - 80


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_is_built_has_as_many(tied: bool, tmp_path: Path) -> None:
    size = ModelSize(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, tie_embeddings=tied)
    num_parameters = write_model(tmp_path, size, seed=0)
    model = read_model(str(tmp_path), {})
    assert model.counted_from == "safetensors headers"
    assert model.num_parameters == model.shape.num_parameters == num_parameters


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


def test_a_path_that_does_not_exist_is_not_sought_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no folder .*/gone. Give the folder of a model, or a name"
    ) as caught:
        read_model(f"{tmp_path}/gone", {})
    assert "hf download" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_experts": 8}, "is a mixture of experts (num_experts = 8)"),
        ({"hidden_size": None}, "its config.json has no hidden_size"),
        ({"model_type": "gemma3_text"}, "no formula is known for model_type = 'gemma3_text'"),
    ],
)
def test_what_the_formulas_do_not_describe_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_model(str(write_config(tmp_path, **changes)), {})
    assert reason in str(caught.value)


def test_a_model_that_only_scores_may_be_any_mixture(tmp_path: Path) -> None:
    folder = write_config(tmp_path, model_type="olmoe", num_experts=8)
    write_safetensors(folder / "model.safetensors", router=[8, 4])
    assert read_model(str(folder), {}, "task.args.teacher").num_parameters == 32
    with pytest.raises(ConfigError, match="is a mixture of experts"):
        read_model(str(folder), {})


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
