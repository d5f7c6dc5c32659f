"""An engine's GPU and its KV cache, by hand."""

from __future__ import annotations

import pytest

from hpc_grpo.plan.engine_memory import KvCache, engine_budget, kv_bytes_per_token, model_parts
from hpc_grpo.plan.fit import make_plan
from hpc_grpo.plan.memory import (
    GH200,
)
from hpc_grpo.plan.model import FAMILY, family_model
from hpc_grpo.types import GIB
from tests.unit.plan.plan_configs import parts, planned_config

SEVEN = family_model("7B")
P = SEVEN.num_parameters


@pytest.mark.parametrize(("tensor_parallel", "expected"), [(1, 57_344), (2, 28_672), (4, 14_336), (8, 14_336)])
def test_kv_cache_of_a_token_by_hand(tensor_parallel: int, expected: int) -> None:
    # 2 x 28 layers x 4 heads x 128 channels x 2 bytes; a GPU holds at least one head
    assert kv_bytes_per_token(FAMILY["7B"], 2, tensor_parallel) == expected


def test_sequences_take_whole_blocks() -> None:
    cache = KvCache(num_bytes=1000 * 16 + 5, bytes_per_token=10, max_model_len=100)
    assert cache.num_tokens == 1600
    assert cache.num_sequences == 1600 // 112


def test_the_cache_gets_what_the_model_leaves() -> None:
    budget, cache = engine_budget(SEVEN, planned_config(), GH200)
    named = parts(budget)
    assert named["weights (bfloat16)"] == 2 * P
    # 8192 tokens x 2 bytes x (4 x 3584 + 3 x 18944), and four float32 arrays of 256 x 152064
    assert named["largest batch, sampling"] == 8192 * 2 * (14_336 + 56_832) + 16 * 256 * 152_064
    assert budget.num_bytes == budget.capacity_bytes == int(0.9 * 96 * GIB)
    assert cache.num_bytes == named["KV cache"]
    assert cache.num_tokens == named["KV cache"] // (57_344 * 16) * 16


def test_tensor_parallelism_divides_weights_and_heads() -> None:
    budget, cache = engine_budget(SEVEN, planned_config(engine={"tensor_parallel": 2}), GH200)
    assert parts(budget)["weights (bfloat16)"] == P
    assert cache.bytes_per_token == 28_672


def test_a_given_cache_is_counted_against_the_whole_gpu() -> None:
    budget, cache = engine_budget(
        SEVEN, planned_config(engine={"kv_cache_gib": 10, "vllm": {"enforce_eager": True}}), GH200
    )
    assert cache.num_bytes == 10 * GIB
    assert budget.capacity_bytes == 96 * GIB
    assert parts(budget)["CUDA context"] == 1 * GIB


def test_an_engine_that_has_no_room_for_one_sequence_does_not_fit() -> None:
    budget, cache = engine_budget(family_model("72B"), planned_config(), GH200)
    assert not budget.fits
    assert cache.num_sequences == 1
    small = make_plan(SEVEN, planned_config(engine={"kv_cache_gib": 0.01}), 2, GH200)
    assert any("raise engine.kv_cache_gib" in problem for problem in small.problems)


def test_an_engine_on_cpu_takes_fewer_tokens_at_once() -> None:
    [_, batch] = model_parts(SEVEN, planned_config(model={"device": "cpu"}, rollout={"max_new_tokens": 512}))
    assert batch.num_bytes == 2048 * 2 * (14_336 + 56_832) + 16 * 256 * 152_064
