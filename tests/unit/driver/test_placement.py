from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hpc_grpo.config import Config
from hpc_grpo.config.resources import check_fits, node_bundles
from hpc_grpo.driver import placement
from hpc_grpo.driver.placement import NodeSlots, reserve_nodes
from hpc_grpo.errors import ConfigError


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
    check_fits(settings, "Node 10.0.0.7", resources, [*learners, *engines])


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


@pytest.fixture
def reserve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[NodeSlots]]:
    """`reserve_nodes` on one node of a Ray with so many GPUs, with the NVIDIA driver or without."""

    def reserve(settings: Config, num_gpus: int, has_driver: bool) -> list[NodeSlots]:
        resources = {"CPU": 8.0, "node:__internal_head__": 1.0, **({"GPU": num_gpus} if num_gpus else {})}
        node = {"Alive": True, "NodeManagerAddress": "10.0.0.7", "Resources": resources}
        driver = tmp_path / "version"
        driver.unlink(missing_ok=True)
        if has_driver:
            driver.touch()
        monkeypatch.setattr(placement, "_NVIDIA_DRIVER", driver)
        monkeypatch.setattr(placement.ray, "nodes", lambda: [node])
        monkeypatch.setattr(placement.ray, "wait", lambda waiting, **_: (waiting, []))
        monkeypatch.setattr(placement, "placement_group", lambda _bundles, **_: Mock())
        return reserve_nodes(settings)

    return reserve


def on_device(device: str, **changes: Any) -> Config:
    settings = config(**changes)
    return settings.model_copy(update={"model": settings.model.model_copy(update={"device": device})})


@pytest.mark.parametrize(("device", "has_driver"), [("auto", True), ("cuda", True), ("cuda", False)])
def test_cuda_without_gpus_in_the_job_is_told_with_the_key(
    reserve: Callable[..., list[NodeSlots]], device: str, has_driver: bool
) -> None:
    with pytest.raises(ConfigError) as caught:
        reserve(on_device(device), 0, has_driver)
    assert f"model.device = {device} " in str(caught.value)
    assert "this job has no GPUs on node 10.0.0.7. With submit, set launch.slurm.gpus_per_node;" in str(caught.value)
    with pytest.raises(ConfigError, match=r"Set placement\.gpus=auto, or model\.device=cpu"):
        reserve(on_device(device, gpus="none"), 4, has_driver)


@pytest.mark.parametrize(
    ("device", "num_gpus", "has_driver"), [("auto", 0, False), ("cpu", 0, True), ("auto", 4, True)]
)
def test_cpus_and_gpus_are_reserved_where_they_are_meant(
    reserve: Callable[..., list[NodeSlots]], device: str, num_gpus: int, has_driver: bool
) -> None:
    (slots,) = reserve(on_device(device), num_gpus, has_driver)
    assert [bundle.get("GPU", 0) for bundle in slots.engine_bundles] == [1 if num_gpus else 0] * 3


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_gpus_of_slurm_without_a_device_behind_them_are_handed_out_to_cpu_runs(
    reserve: Callable[..., list[NodeSlots]], device: str
) -> None:
    """As on a cluster to try things on: GRES of name only, no driver."""
    (slots,) = reserve(on_device(device), 4, False)
    assert slots.learner_options(0)["num_gpus"] == 1
