from __future__ import annotations

import pytest

from hpc_grpo.config.resources import weight_bytes
from hpc_grpo.plan.engine_memory import KvCache, engine_budget, kv_bytes_per_token
from hpc_grpo.plan.fit import make_plan
from hpc_grpo.plan.memory import Hardware
from hpc_grpo.plan.model import FAMILY, family_model
from hpc_grpo.plan.node_memory import host_budget, shared_memory_budget
from hpc_grpo.plan.step import workload
from hpc_grpo.types import GIB
from tests.unit.plan.plan_configs import GH200, least_config, parts

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
    budget, cache = engine_budget(SEVEN, least_config(), GH200)
    named = parts(budget)
    assert named["weights (bfloat16)"] == 2 * P
    # 2048 tokens x 2 bytes x (4 x 3584 + 3 x 18944), and four float32 arrays of 256 x 152064
    assert named["largest batch, sampling"] == 2048 * 2 * (14_336 + 56_832) + 16 * 256 * 152_064
    assert budget.num_bytes == budget.capacity_bytes == int(0.9 * 96 * GIB)
    assert cache.num_bytes == named["KV cache"]
    assert cache.num_tokens == named["KV cache"] // (57_344 * 16) * 16


def test_tensor_parallelism_divides_weights_and_heads() -> None:
    budget, cache = engine_budget(SEVEN, least_config(engine={"tensor_parallel": 2}), GH200)
    assert parts(budget)["weights (bfloat16)"] == P
    assert cache.bytes_per_token == 28_672


def test_a_given_cache_is_counted_against_the_whole_gpu() -> None:
    budget, cache = engine_budget(SEVEN, least_config(engine={"kv_cache_gib": 10, "enforce_eager": True}), GH200)
    assert cache.num_bytes == 10 * GIB
    assert budget.capacity_bytes == 96 * GIB
    assert parts(budget)["CUDA context"] == 1 * GIB


def test_an_engine_that_has_no_room_for_one_sequence_does_not_fit() -> None:
    budget, cache = engine_budget(family_model("72B"), least_config(), GH200)
    assert not budget.fits
    assert cache.num_sequences == 1
    small = make_plan(SEVEN, least_config(engine={"kv_cache_gib": 0.01}), 2, GH200)
    assert any("raise engine.kv_cache_gib" in problem for problem in small.problems)


def test_host_memory_by_hand() -> None:
    config = least_config(
        weights={"num_buffers": 2},
        launch={"object_store_gib": 16},
        train={"zero_stage": 2, "offload_optimizer": "cpu"},
    )
    named = parts(host_budget(SEVEN, config, 1, 0, GH200))
    assert named.pop("rounding of page-locked arrays") == 2 * (32 * GIB - 4 * P) + 16 * GIB - 2 * P
    assert named == {
        "weight store in /dev/shm": 4 * P,
        "Ray's object store in /dev/shm": 16 * GIB,
        "optimizer (float32 weights, moments)": 12 * P,
        "gradients (float32)": 4 * P,
        "copies on their way to the GPU": 2 * P,
        "processes": int((4 * 5 + 0.5 + 4) * GIB),
    }
    shared = shared_memory_budget(SEVEN, config, GH200)
    assert shared.num_bytes == 4 * P + 16 * GIB
    assert shared.capacity_bytes == 230 * GIB


def test_a_learner_of_two_on_a_node_offloads_half() -> None:
    config = least_config(
        train={"zero_stage": 3, "offload_optimizer": "cpu"},
        placement={"learners_per_node": 2},
        engine={"engines_per_node": 2},
    )
    named = parts(host_budget(SEVEN, config, 2, 0, GH200))
    assert named["optimizer (float32 weights, moments)"] == 12 * P


def test_sft_has_neither_store_nor_engines() -> None:
    config = least_config().model_copy(update={"task": "sft"})
    plan = make_plan(SEVEN, config, 4, GH200)
    assert {budget.device for budget in plan.budgets} == {"learner GPU", "node's host memory", "node's shared memory"}
    assert "weight store in /dev/shm" not in parts(plan.budgets[1])
    assert workload(plan).num_sequences == config.sft.batch_size
    assert workload(plan).max_tokens is None


def test_on_cpu_everything_is_host_memory() -> None:
    config = least_config(model={"device": "cpu", "dtype": "float32"}, engine={"engines_per_node": 2})
    small = family_model("0.5B")
    plan = make_plan(small, config, 1, Hardware(1, 200 * GIB))
    assert [budget.device for budget in plan.budgets] == ["node's host memory", "node's shared memory"]
    named = parts(plan.budgets[0])
    assert named["learner: weights (float32)"] == 4 * small.num_parameters
    assert named["engines: weights, largest batch"] >= 2 * 4 * small.num_parameters
    assert named["engines: KV cache"] == 2 * GIB // 4


def test_more_gpus_than_the_job_asks_for_is_a_problem() -> None:
    config = least_config(engine={"engines_per_node": 4}, launch={"slurm": {"gpus_per_node": 4}})
    assert "GPUs: 5 needed on each node, launch.slurm.gpus_per_node = 4" in make_plan(SEVEN, config, 4, GH200).problems


def test_an_export_that_does_not_fit_beside_training_is_a_warning() -> None:
    config = least_config(train={"zero_stage": 3})
    host = make_plan(SEVEN, config, 2, GH200).budgets[2].num_bytes
    assert (
        make_plan(SEVEN, config, 2, Hardware(96 * GIB, host + weight_bytes(config, SEVEN.num_parameters))).warnings
        == ()
    )
    tight = make_plan(SEVEN, config, 2, Hardware(96 * GIB, host + weight_bytes(config, SEVEN.num_parameters) - 1))
    assert tight.fits
    assert "The export collects the weights once more on the head node" in tight.warnings[0]


def test_tokens_of_a_step_by_hand() -> None:
    load = workload(make_plan(SEVEN, least_config(train={"zero_stage": 3}), 2, GH200))
    assert load.num_sequences == 64 * 16
    assert load.max_tokens == 1024 * 4096
    assert load.max_new_tokens == 1024 * 3072
    assert load.sequences_per_engine == 171  # 1024 / 6 engines
    assert load.num_microbatches == 256  # 512 a learner, two of 4096 tokens in each 8192
    assert load.running_sequences == 256
