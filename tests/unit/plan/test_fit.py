"""The design's table of what fits on GH200 nodes (7B and 32B, mixed-precision Adam), and what else may not fit."""

from __future__ import annotations

import pytest

from hpc_grpo.config.resources import weight_bytes
from hpc_grpo.config.train import SftTask
from hpc_grpo.plan.fit import make_plan
from hpc_grpo.plan.memory import ENGINE_GPU, GH200, LEARNER_GPU, SHARED_GPU, Hardware
from hpc_grpo.plan.model import family_model
from hpc_grpo.plan.step import workload
from hpc_grpo.types import GIB
from tests.unit.plan.plan_configs import parts, plan_7b_config, planned_config

OFFLOAD = "train.offload_optimizer=cpu"
WITH_REFERENCE = "loss.kl.coef=0.01"
SEVEN = family_model("7B")


def stage(number: int) -> str:
    return f"train.zero_stage={number}"


@pytest.mark.parametrize(
    ("size", "num_nodes", "overrides", "fits"),
    [
        # 7B on one node needs offload
        ("7B", 1, [stage(1)], False),
        ("7B", 1, [stage(2)], False),
        ("7B", 1, [stage(3)], False),
        ("7B", 1, [stage(2), OFFLOAD], True),
        ("7B", 1, [stage(3), OFFLOAD], True),
        # two nodes: ZeRO-3, or ZeRO-2 without a reference
        ("7B", 2, [stage(3)], True),
        ("7B", 2, [stage(3), WITH_REFERENCE], True),
        ("7B", 2, [stage(2)], True),
        ("7B", 2, [stage(2), WITH_REFERENCE], False),
        # from four: ZeRO-2
        ("7B", 4, [stage(2)], True),
        ("7B", 4, [stage(2), WITH_REFERENCE], True),
        # 32B on one node is refused, whatever is done
        *[("32B", 1, [stage(number)], False) for number in (1, 2, 3)],
        *[("32B", 1, [stage(number), OFFLOAD], False) for number in (1, 2, 3)],
        # two nodes: offload
        ("32B", 2, [stage(3), OFFLOAD], True),
        ("32B", 2, [stage(3)], False),
        # ten nodes: ZeRO-3 without offload
        ("32B", 10, [stage(3)], True),
        ("32B", 8, [stage(3)], False),
    ],
)
def test_what_fits(size: str, num_nodes: int, overrides: list[str], fits: bool) -> None:
    plan = plan_7b_config(size, num_nodes, *overrides)
    assert plan.fits is fits, plan.problems


def test_gigabytes_of_7b_with_offload() -> None:
    """16 bytes a parameter on the host are 122 GB; float32 sums of gradients take 4 on the GPU, not 2."""
    plan = plan_7b_config("7B", 1, stage(2), OFFLOAD)
    host = parts(plan.budgets[2])
    moved = host["optimizer (float32 weights, moments)"] + host["gradients (float32)"]
    assert moved / 1e9 == pytest.approx(122, abs=0.5)
    gpu = parts(plan.budgets[0])
    assert gpu["weights (bfloat16)"] / 1e9 == pytest.approx(15.2, abs=0.05)
    assert gpu["gradients (summed in float32)"] / 1e9 == pytest.approx(30.5, abs=0.05)


@pytest.mark.parametrize(("size", "gigabytes"), [("7B", 15), ("32B", 65)])
def test_the_weight_store_takes_two_bytes_a_parameter(size: str, gigabytes: int) -> None:
    store = parts(plan_7b_config(size, 2).budgets[2])["weight store in /dev/shm"]
    assert store / 1e9 == pytest.approx(gigabytes, abs=0.6)


def test_sft_has_neither_store_nor_engines() -> None:
    config = planned_config().model_copy(update={"task": SftTask()})
    plan = make_plan(SEVEN, config, 4, GH200)
    assert {budget.device for budget in plan.budgets} == {"learner GPU", "node's host memory", "node's shared memory"}
    assert "weight store in /dev/shm" not in parts(plan.budgets[1])
    assert workload(plan) is None


def test_more_gpus_than_the_job_asks_for_is_a_problem() -> None:
    config = planned_config(engine={"engines_per_node": 4}, launch={"slurm": {"gpus_per_node": 4}})
    assert "GPUs: 5 needed on each node, launch.slurm.gpus_per_node = 4" in make_plan(SEVEN, config, 4, GH200).problems


def test_an_export_that_does_not_fit_beside_training_is_a_warning() -> None:
    config = planned_config(train={"zero_stage": 3})
    host = make_plan(SEVEN, config, 2, GH200).budgets[2].num_bytes
    assert (
        make_plan(SEVEN, config, 2, Hardware(96 * GIB, host + weight_bytes(config, SEVEN.num_parameters))).warnings
        == ()
    )
    tight = make_plan(SEVEN, config, 2, Hardware(96 * GIB, host + weight_bytes(config, SEVEN.num_parameters) - 1))
    assert tight.fits
    assert "The export collects the weights once more on the head node" in tight.warnings[0]


IN_TURN = ["placement.colocate=true", "engine.engines_per_node=1", stage(2), "train.offload_optimizer=none"]


def test_a_gpu_that_learner_and_engine_share_holds_the_states_of_one_beside_the_other() -> None:
    plan = plan_7b_config("1.5B", 1, *IN_TURN, "engine.vllm.gpu_memory_utilization=0.5")
    devices = [budget.device for budget in plan.budgets]
    assert SHARED_GPU in devices
    assert not {LEARNER_GPU, ENGINE_GPU} & {*devices}
    budget = plan.budgets[devices.index(SHARED_GPU)]
    named = parts(budget)
    assert named["learner: optimizer (float32 weights, moments)"] == 12 * plan.model.num_parameters
    engine = sum(size for name, size in named.items() if name.startswith("engine: "))
    assert engine == pytest.approx(0.5 * GH200.gpu_bytes, rel=1e-6)
    assert "activations kept" not in named  # the fuller phase is the sampling
    assert budget.capacity_bytes == GH200.gpu_bytes
    assert plan.fits


def test_a_shared_gpu_is_counted_at_the_training_where_that_takes_more() -> None:
    longer = "train.max_tokens_per_microbatch=262144"
    plan = plan_7b_config("1.5B", 1, *IN_TURN, longer, "engine.vllm.gpu_memory_utilization=0.1")
    named = parts(next(budget for budget in plan.budgets if budget.device == SHARED_GPU))
    assert named["engine asleep: CUDA context and graphs"] == 2 * GIB
    assert "activations kept" in named
    eager = plan_7b_config(
        "1.5B", 1, *IN_TURN, longer, "engine.vllm.gpu_memory_utilization=0.1", "engine.vllm.enforce_eager=true"
    )
    named = parts(next(budget for budget in eager.budgets if budget.device == SHARED_GPU))
    assert named["engine asleep: CUDA context"] == GIB
