"""AReaL's allocation_mode, in its spellings, against the GPUs that are there."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_grpo.foreign.areal import ROWS
from hpc_grpo.foreign.table import Kind, Outcome, RefusedError, node_shape, translate


def outcome_of(text: str, nodes: int = 1, gpus: int = 8) -> Outcome:
    given = {"allocation_mode": text, "n_nodes": nodes, "n_gpus_per_node": gpus}
    return next(each for each in translate(ROWS, given).outcomes if each.theirs == "allocation_mode")


def shape_of(outcome: Outcome) -> tuple[Any, ...]:
    keys = ("placement.learners_per_node", "engine.engines_per_node", "engine.tensor_parallel", "train.zero_stage")
    return tuple(outcome.ours.get(key) for key in keys)


@pytest.mark.parametrize(
    "text",
    ["vllm.d4t1+d2", "vllm:d4t1+d2", "vllm:d4t1+fsdp:d2", "vllm.d4p1m1+d2p1m1", "vllm[rollout]:d4+fsdp[actor]:d2"],
)
def test_the_spellings_mean_the_same(text: str) -> None:
    outcome = outcome_of(text, 1, 6)
    assert (outcome.kind, outcome.note) == (Kind.TRANSLATED, "")
    assert shape_of(outcome) == (2, 4, 1, 3)


def test_parts_are_shared_out_among_the_nodes() -> None:
    assert shape_of(outcome_of("vllm:d8t2+d16", 4, 8)) == (4, 2, 2, 3)


@pytest.mark.parametrize(
    ("text", "shape", "note"),
    [
        ("sglang.d4+d4", (4, 4, 1, 3), "SGLang samples there, vLLM here"),
        ("sglang.d4p1m1+d2p2m1", (4, 4, 1, 3), "4 GPUs train as d2p2m1 there, as 4 learners with ZeRO 3 here"),
        ("vllm:d2p2+d4", (4, 2, 2, 3), "an engine's 2 GPUs are vllm:d2p2 there, tensor parallel here"),
        ("vllm:d4+d2t2", (4, 4, 1, 3), "4 GPUs train as d2t2 there"),
        ("vllm:d4+d2c2", (4, 4, 1, 3), "4 GPUs train as d2c2 there"),
        ("vllm:d4+megatron:d4", (4, 4, 1, 3), "4 GPUs train as megatron:d4 there"),
    ],
)
def test_other_engines_and_kinds_of_parallelism_are_told(text: str, shape: tuple[Any, ...], note: str) -> None:
    outcome = outcome_of(text)
    assert (outcome.kind, shape_of(outcome)) == (Kind.DIFFERS, shape)
    assert note in outcome.note


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("vllm:d4+d3", "takes 7 GPUs, and 1 nodes of 8 have 8"),
        ("vllm:d8+d8", "8 engines of 1 GPUs take 16, and 1 nodes of 8 have 8"),
        ("vllm[r]:d8|fsdp[a]:d8", "one part that generates and one that trains"),
        ("d8", "one part that generates and one that trains"),
        ("vllm:d4+fsdp:x4", "'fsdp:x4' cannot be read"),
        ("d4+d4", "must begin with the engine"),
    ],
)
def test_what_is_not_here_is_refused_with_the_reason(text: str, reason: str) -> None:
    outcome = outcome_of(text)
    assert outcome.kind is Kind.REFUSED
    assert reason in outcome.note


def test_backends_that_use_a_part_of_the_gpus_ask_for_no_more() -> None:
    given = {"rollout.backend": "vllm:d1", "actor.backend": "fsdp:d1", "cluster.n_nodes": 1}
    ours = translate(ROWS, given).ours
    assert (ours["launch.slurm.gpus_per_node"], ours["engine.engines_per_node"]) == (2, 1)


def test_uneven_shares_are_refused_with_the_nearest_shape_that_fits() -> None:
    with pytest.raises(RefusedError, match="multiples of 2") as refused:
        node_shape(3, 13, 1, 2, 8)
    assert refused.value.instead["placement.learners_per_node"] == 2
    assert refused.value.instead["engine.engines_per_node"] == 6
