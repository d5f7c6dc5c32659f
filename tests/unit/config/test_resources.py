from __future__ import annotations

from typing import Any

import pytest

from hpc_grpo.config.resources import (
    check_fits,
    kv_cache_gib,
    max_batched_tokens,
    node_demand,
    object_store_bytes,
    weight_store_bytes,
)
from hpc_grpo.errors import ConfigError
from hpc_grpo.types import GIB
from tests.support.configs import minimal_config


def test_a_gh200_node_holds_one_learner_and_three_engines() -> None:
    demand = node_demand(minimal_config(), with_gpus=True)
    assert demand.learners == ({"CPU": 0.5, "GPU": 1},)
    assert demand.engines == ({"CPU": 0.5, "GPU": 1},) * 3
    assert (demand.num_cpus, demand.num_gpus) == (2.0, 4)


def test_a_tensor_parallel_engine_has_its_gpus_in_one_bundle() -> None:
    config = minimal_config(engine={"engines_per_node": 1, "tensor_parallel": 2}, placement={"learners_per_node": 2})
    demand = node_demand(config, with_gpus=True)
    assert [bundle["GPU"] for bundle in demand.learners] == [1, 1]
    assert demand.engines == ({"CPU": 0.5, "GPU": 2},)


def test_a_node_without_gpus_is_asked_for_none() -> None:
    demand = node_demand(minimal_config(), with_gpus=False)
    assert all("GPU" not in bundle for bundle in demand.bundles)


def test_sft_has_no_engines_and_no_weight_store() -> None:
    config = minimal_config(task="sft")
    assert len(node_demand(config, with_gpus=True).learners) == 1
    assert node_demand(config, with_gpus=True).engines == ()
    assert weight_store_bytes(config, 1000) == 0


@pytest.mark.parametrize(
    ("dtype", "engine_dtype", "expected"),
    [
        ("bfloat16", None, 2000),
        ("float32", None, 4000),
        ("float32", "bfloat16", 2000),
    ],
)
def test_the_weight_store_holds_the_published_precision_once(
    dtype: str, engine_dtype: str | None, expected: int
) -> None:
    config = minimal_config(model={"dtype": dtype}, engine={"dtype": engine_dtype})
    assert weight_store_bytes(config, 1000) == expected


def check(num_gpus: float, num_cpus: float, *, with_gpus: bool, **sections: Any) -> None:
    config = minimal_config(**sections)
    demand = node_demand(config, with_gpus=with_gpus)
    check_fits(config, "Node 10.0.0.7", demand, num_gpus=num_gpus, num_cpus=num_cpus)


def test_what_fits_exactly_fits() -> None:
    check(4, 2, with_gpus=True)
    check(0, 2, with_gpus=False)


def test_too_few_gpus_are_an_error_with_the_sum() -> None:
    with pytest.raises(ConfigError) as caught:
        check(4, 64, with_gpus=True, engine={"tensor_parallel": 2})
    message = str(caught.value)
    assert "Node 10.0.0.7 has 4 GPUs" in message
    assert "need 7" in message
    assert "engine.engines_per_node = 3 (engine.tensor_parallel = 2)" in message


def test_too_few_cpus_are_an_error_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"has 1 CPUs.* need 2\. Use fewer engines"):
        check(0, 1, with_gpus=False)


@pytest.mark.parametrize(
    ("wanted_gib", "free_gib", "expected"), [(1.0, 100.0, GIB), (1.0, 1.0, int(0.4 * GIB)), (1e-9, 1.0, 80 * 2**20)]
)
def test_the_object_store_takes_what_is_wanted_up_to_a_share_and_never_less_than_ray_needs(
    wanted_gib: float, free_gib: float, expected: int
) -> None:
    assert object_store_bytes(wanted_gib, free_gib * GIB) == expected


def test_the_kv_cache_is_what_the_config_says_else_a_default_on_cpu_alone() -> None:
    assert kv_cache_gib(minimal_config(engine={"kv_cache_gib": 2.0}), on_gpu=True) == 2.0
    assert kv_cache_gib(minimal_config(), on_gpu=False) == 0.25
    assert kv_cache_gib(minimal_config(), on_gpu=True) is None


@pytest.mark.parametrize(("given", "on_gpu", "expected"), [(None, True, 8192), (None, False, 2048), (512, True, 512)])
def test_a_step_of_an_engine_takes_what_the_config_says_else_what_the_device_can_use(
    given: int | None, on_gpu: bool, expected: int
) -> None:
    assert (
        max_batched_tokens(minimal_config(engine={"vllm": {"max_num_batched_tokens": given}}), on_gpu=on_gpu)
        == expected
    )


def test_a_step_of_an_engine_takes_a_token_for_each_request_that_decodes() -> None:
    assert max_batched_tokens(minimal_config(engine={"vllm": {"max_num_seqs": 10_000}}), on_gpu=True) == 10_000


def test_a_step_of_an_engine_takes_no_more_than_may_run_at_once() -> None:
    short = {"data": {"max_prompt_tokens": 16}, "rollout": {"max_new_tokens": 24}}
    assert max_batched_tokens(minimal_config(short, engine={"vllm": {"max_num_seqs": 32}}), on_gpu=True) == 32 * 40


@pytest.mark.parametrize("given", [None, 512])
def test_a_step_of_an_engine_on_cpu_takes_a_whole_sequence(given: int | None) -> None:
    long = {"data": {"max_prompt_tokens": 4000}, "rollout": {"max_new_tokens": 1000}}
    assert (
        max_batched_tokens(minimal_config(long, engine={"vllm": {"max_num_batched_tokens": given}}), on_gpu=False)
        == 5000
    )


def test_a_learner_and_an_engine_that_share_a_gpu_are_reserved_together() -> None:
    config = minimal_config(placement={"colocate": True, "learners_per_node": 2}, engine={"engines_per_node": 2})
    demand = node_demand(config, with_gpus=True)
    assert demand.bundles == ({"CPU": 1.0, "GPU": 1}, {"CPU": 1.0, "GPU": 1})  # halves could meet on one GPU
    assert [bundle["GPU"] for bundle in (*demand.learners, *demand.engines)] == [0.5] * 4
    assert (demand.num_gpus, demand.num_cpus) == (2, 2.0)
    assert node_demand(config, with_gpus=False).bundles == ({"CPU": 1.0}, {"CPU": 1.0})


def test_a_gpu_that_is_too_few_is_enough_for_both_in_turn() -> None:
    config = minimal_config(engine={"engines_per_node": 1})
    with pytest.raises(ConfigError, match=r"share GPUs: placement\.colocate=true"):
        check_fits(config, "Node a", node_demand(config, with_gpus=True), num_gpus=1, num_cpus=8)
    shared = minimal_config(engine={"engines_per_node": 1}, placement={"colocate": True})
    check_fits(shared, "Node a", node_demand(shared, with_gpus=True), num_gpus=1, num_cpus=8)
