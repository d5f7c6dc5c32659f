from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.plan.model import FAMILY, ModelShape, read_model

LLAMA_3_8B = ModelShape(4096, 32, 32, 8, 128, 14_336, 128_256)
MISTRAL_7B = ModelShape(4096, 32, 32, 8, 128, 14_336, 32_000)
QWEN3_8B = ModelShape(4096, 36, 32, 8, 128, 12_288, 151_936, has_query_key_norm=True)


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
    ],
)
def test_the_formula_gives_the_published_counts(shape: ModelShape, published: int) -> None:
    assert shape.num_parameters == published


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
