"""Rules of what runs where; those of an engine's batch and of attention are tested with the other rules."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_grpo.config.rules import check_rules
from hpc_grpo.errors import ConfigError
from tests.support.configs import minimal_config

SHARED: dict[str, Any] = {
    "placement": {"colocate": True},
    "engine": {"engines_per_node": 1, "vllm": {"gpu_memory_utilization": 0.5}},
}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"rollout": {"max_policy_lag": 1}}, "rollout.max_policy_lag = 1 runs both at the same time"),
        (
            {"engine": {"engines_per_node": 3}},
            r"engine.engines_per_node = 3 must equal placement.learners_per_node = 1",
        ),
        ({"engine": {"tensor_parallel": 2}}, "engine.tensor_parallel = 2 must be 1"),
        (
            {"engine": {"vllm": {"gpu_memory_utilization": 0.9}}},
            "gpu_memory_utilization = 0.9 leaves too little memory",
        ),
        ({"task": "sft"}, "task sft has no engines"),
    ],
)
def test_what_cannot_share_a_gpu_is_refused_with_what_can(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_rules(minimal_config(SHARED, **sections))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"engine": {"vllm": {"gpu_memory_utilization": 0.9}, "kv_cache_gib": 4.0}},
        {"engine": {"vllm": {"gpu_memory_utilization": 0.9}}, "model": {"device": "cpu"}},
        {"placement": {"learners_per_node": 4}, "engine": {"engines_per_node": 4}},
    ],
)
def test_learners_and_engines_in_pairs_may_share(sections: dict[str, Any]) -> None:
    check_rules(minimal_config(SHARED, **sections))


def test_an_environment_to_copy_beside_a_container_is_refused() -> None:
    launch = {"stage": {"environment": "/env.squashfs"}, "container": {"image": "ours:1"}}
    with pytest.raises(
        ConfigError, match=r"/env.squashfs, but .* launch.container.image = ours:1, .* launch.container=null"
    ):
        check_rules(minimal_config(launch=launch))
