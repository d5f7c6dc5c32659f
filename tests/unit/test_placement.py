from __future__ import annotations

from typing import Any

import pytest

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.placement import check_fits, node_bundles


def config(task: str = "grpo", engine: dict[str, Any] | None = None, **placement: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "r"},
            "task": task,
            "model": {"path": "m"},
            "data": {"train": {"path": "d"}},
            "train": {"total_steps": 1},
            "engine": engine or {},
            "placement": placement,
        }
    )


def test_a_gh200_node_holds_one_learner_and_three_engines() -> None:
    learners, engines = node_bundles(config(), with_gpus=True)
    assert learners == ({"CPU": 0.5, "GPU": 1},)
    assert engines == ({"CPU": 0.5, "GPU": 1},) * 3


def test_tensor_parallel_engine_has_its_gpus_in_one_bundle() -> None:
    settings = config(engine={"engines_per_node": 1, "tensor_parallel": 2}, learners_per_node=2, cpus_per_engine=4)
    learners, engines = node_bundles(settings, with_gpus=True)
    assert [bundle["GPU"] for bundle in learners] == [1, 1]
    assert engines == ({"CPU": 4, "GPU": 2},)


def test_no_gpus_are_asked_for_without_any() -> None:
    learners, engines = node_bundles(config(), with_gpus=False)
    assert all("GPU" not in bundle for bundle in (*learners, *engines))


def test_sft_reserves_no_engines() -> None:
    learners, engines = node_bundles(config("sft"), with_gpus=True)
    assert len(learners) == 1
    assert engines == ()


def check(settings: Config, resources: dict[str, float], with_gpus: bool) -> None:
    learners, engines = node_bundles(settings, with_gpus=with_gpus)
    check_fits(settings, "10.0.0.7", resources, [*learners, *engines])


def test_what_fits_exactly_fits() -> None:
    check(config(), {"CPU": 2, "GPU": 4}, with_gpus=True)
    check(config(), {"CPU": 2}, with_gpus=False)


def test_too_few_gpus_are_told_with_the_sum() -> None:
    with pytest.raises(ConfigError) as caught:
        check(config(engine={"tensor_parallel": 2}), {"CPU": 64, "GPU": 4}, with_gpus=True)
    message = str(caught.value)
    assert "Node 10.0.0.7 has 4 GPUs" in message
    assert "need 7" in message
    assert "engine.engines_per_node = 3 (engine.tensor_parallel = 2)" in message


def test_too_few_cpus_are_told_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"has 1 CPUs.* need 2\..* placement\.cpus_per_engine"):
        check(config(), {"CPU": 1}, with_gpus=False)
