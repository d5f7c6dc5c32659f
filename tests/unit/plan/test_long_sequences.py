"""Sequence parallel in the plan, and the table of docs/memory.md that is made of plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpc_grpo.plan.fit import Plan, changes_that_fit, make_plan
from hpc_grpo.plan.memory import GH200
from hpc_grpo.plan.model import family_model
from hpc_grpo.plan.step import workload
from hpc_grpo.simulate.assumed import training_rate
from hpc_grpo.types import GIB
from tests.unit.plan.plan_configs import parts, planned_config

DOCS = Path(__file__).parents[3] / "docs" / "memory.md"
K = 1024


def planned(tokens: int, nodes: int, degree: int, offload: str = "none") -> Plan:
    train = {"zero_stage": 3, "max_tokens_per_microbatch": tokens, "attention": "varlen", "share_prompts": False}
    config = planned_config(
        data={"max_prompt_tokens": 2 * K},
        rollout={"max_new_tokens": tokens - 2 * K, "prompts_per_step": 16, "group_size": 8},
        train={**train, "sequence_parallel": degree, "offload_optimizer": offload},
        placement={"learners_per_node": 2},
        engine={"engines_per_node": 2},
        launch={"num_nodes": nodes},
    )
    return make_plan(family_model("7B"), config, nodes, GH200)


def cell(tokens: int, nodes: int, degree: int, offload: str) -> str:
    if 2 * nodes % degree:
        return "-"
    plan = planned(tokens, nodes, degree, offload)
    load, (learner, *_) = workload(plan), plan.budgets
    assert load is not None
    seconds = training_rate(plan)(load.max_new_tokens / plan.num_learners)
    return f"{learner.num_bytes / GIB:.0f}{'' if learner.fits else ', does not fit'}; {seconds:.0f} s"


def rows() -> Iterator[str]:
    for tokens in (32 * K, 128 * K):
        for nodes in (1, 2, 4):
            for offload in ("none", "cpu"):
                cells = (cell(tokens, nodes, degree, offload) for degree in (1, 2, 4))
                yield f"| {tokens // K}k | {nodes} | {offload} | {' | '.join(cells)} |"


def test_the_table_of_the_docs_is_what_plan_says() -> None:
    assert "\n".join(rows()) in DOCS.read_text()


def test_learners_that_share_a_row_hold_their_part_of_its_activations() -> None:
    (alone, *_), (shared, *_) = (planned(128 * K, 4, degree).budgets for degree in (1, 4))
    one, four = parts(alone), parts(shared)
    assert four["activations kept"] * 4 == one["activations kept"] == 2 * 3584 * 28 * 128 * K
    assert four["heads sent to other learners, and got"] == 4 * 2 * (3584 + 512) * 32 * K
    assert four["weights (bfloat16)"] == one["weights (bfloat16)"]


def test_plan_suggests_to_share_rows_where_one_sequence_does_not_fit() -> None:
    plan = planned(128 * K, 2, 1)
    assert not plan.fits
    assert "train.sequence_parallel=2" in [change.text for change in changes_that_fit(plan)]


def test_a_degree_that_divides_neither_learners_nor_heads_does_not_fit() -> None:
    (problem,) = planned(32 * K, 4, 8).problems
    assert problem == "train.sequence_parallel = 8 does not divide 28 heads, 4 key heads"
