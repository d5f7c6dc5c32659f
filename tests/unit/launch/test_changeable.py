from __future__ import annotations

import re

import pytest

from hpc_grpo.config import load_config, with_overrides
from hpc_grpo.launch import changeable
from hpc_grpo.launch.changeable import CHANGEABLE, differences, may_change

DEBUG = load_config("local/debug")


@pytest.mark.parametrize("entry", CHANGEABLE)
def test_every_entry_names_keys_that_exist_and_has_a_reason(entry: str) -> None:
    keys = changeable._flat(DEBUG.model_dump(mode="json"))
    assert any(re.fullmatch(changeable._pattern(entry), key) for key in keys)
    assert CHANGEABLE[entry]


@pytest.mark.parametrize(
    ("key", "may"),
    [
        ("train.total_steps", True),
        ("train.total_steps_more", False),
        ("train.lr", False),
        ("train.zero_stage", False),
        ("train.offload_optimizer", False),
        ("rollout.group_size", False),
        ("placement.learners_per_node", True),
        ("launch.slurm.extra.exclude", True),
        ("rewards.0.timeout_s", True),
        ("rewards.12.timeout_s", True),
        ("rewards.0.args.timeout_s", False),
        ("rewards.0.weight", False),
        ("rewards", False),
    ],
)
def test_what_may_change(key: str, may: bool) -> None:
    assert may_change(key) is may


def test_items_of_a_list_of_sections_are_keys() -> None:
    one = with_overrides(DEBUG, ["rewards=[{name: correctness}]"])
    other = with_overrides(one, ["rewards.0.timeout_s=60", "train.betas=[0.8, 0.9]"])
    assert differences(one, other) == {
        "rewards.0.timeout_s": (10.0, 60.0),
        "train.betas": ([0.9, 0.95], [0.8, 0.9]),
    }
    two = with_overrides(one, ["rewards=[{name: correctness}, {name: strict_format}]"])
    assert differences(one, two)["rewards.1.name"] == (None, "strict_format")
