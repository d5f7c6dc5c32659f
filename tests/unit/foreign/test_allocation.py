"""AReaL's allocation_mode, in its spellings, against the GPUs that are there."""

from __future__ import annotations

import pytest

from hpc_grpo.foreign.allocation import allocation_values, node_shape
from hpc_grpo.foreign.table import RefusedError


@pytest.mark.parametrize(
    "text",
    ["vllm.d4t1+d2", "vllm:d4t1+d2", "vllm:d4t1+fsdp:d2", "vllm.d4p1m1+d2p1m1", "vllm[rollout]:d4+fsdp[actor]:d2"],
)
def test_the_spellings_mean_the_same(text: str) -> None:
    assert allocation_values(text, 1, 6) == {
        "launch.num_nodes": 1,
        "launch.slurm.gpus_per_node": 6,
        "engine.tensor_parallel": 1,
        "placement.learners_per_node": 2,
        "engine.engines_per_node": 4,
    }


def test_parts_are_shared_out_among_the_nodes() -> None:
    values = allocation_values("vllm:d8t2+d16", 4, 8)
    assert (values["engine.engines_per_node"], values["engine.tensor_parallel"]) == (2, 2)
    assert values["placement.learners_per_node"] == 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("vllm:d4+d3", "takes 7 GPUs, and 1 nodes of 8 have 8"),
        ("sglang:d4+d4", "SGLang is not here"),
        ("vllm:d2p2+d4", "pipeline parallelism of engines"),
        ("vllm:d4+d2p2", "pipeline parallelism in training"),
        ("vllm:d4+d2t2", "tensor parallelism in training"),
        ("vllm:d4+d2c2", "context parallelism in training"),
        ("vllm:d4+megatron:d4", "Megatron is not here"),
        ("vllm[r]:d8|fsdp[a]:d8", "one part that generates and one that trains"),
        ("d8", "one part that generates and one that trains"),
        ("vllm:d4+fsdp:x4", "'fsdp:x4' cannot be read"),
        ("d4+d4", "must begin with the engine"),
    ],
)
def test_what_is_not_here_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(RefusedError, match=r".") as refused:
        allocation_values(text, 1, 8)
    assert reason in str(refused.value)


def test_a_refusal_names_the_shape_that_stands_in_its_place() -> None:
    with pytest.raises(RefusedError) as refused:
        allocation_values("sglang:d4t1+d4", 1, 8)
    assert refused.value.instead["engine.engines_per_node"] == 4


def test_uneven_shares_are_refused_with_the_nearest_shape_that_fits() -> None:
    with pytest.raises(RefusedError, match="multiples of 2") as refused:
        node_shape(3, 13, 1, 2, 8)
    assert refused.value.instead["placement.learners_per_node"] == 2
    assert refused.value.instead["engine.engines_per_node"] == 6
