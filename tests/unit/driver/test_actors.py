from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hpc_grpo.config import Config
from hpc_grpo.driver import actors
from hpc_grpo.driver.actors import NodeSlots, reserve_nodes
from hpc_grpo.errors import ConfigError
from hpc_grpo.template import environment
from tests.support.configs import minimal_config


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
        monkeypatch.setattr(environment, "_NVIDIA_DRIVER", driver)
        monkeypatch.setattr(actors.ray, "nodes", lambda: [node])
        monkeypatch.setattr(actors.ray, "wait", lambda waiting, **_: (waiting, []))
        monkeypatch.setattr(actors, "placement_group", lambda _bundles, **_: Mock())
        return reserve_nodes(settings)

    return reserve


def on_device(device: str, **placement: Any) -> Config:
    return minimal_config(model={"device": device}, placement=placement)


@pytest.mark.parametrize(("device", "has_driver"), [("auto", True), ("cuda", True), ("cuda", False)])
def test_cuda_without_gpus_in_the_job_is_an_error_that_names_the_key(
    reserve: Callable[..., list[NodeSlots]], device: str, has_driver: bool
) -> None:
    with pytest.raises(ConfigError) as caught:
        reserve(on_device(device), 0, has_driver)
    assert f"model.device = {device} " in str(caught.value)
    assert "this job has no GPUs on node 10.0.0.7. With submit, set launch.slurm.gpus_per_node;" in str(caught.value)


@pytest.mark.parametrize(
    ("device", "num_gpus", "reserved"), [("auto", 0, 0), ("cpu", 0, 0), ("cpu", 4, 0), ("auto", 4, 1), ("cuda", 4, 1)]
)
def test_cpus_and_gpus_are_reserved_where_they_are_meant(
    reserve: Callable[..., list[NodeSlots]], device: str, num_gpus: int, reserved: int
) -> None:
    (slots,) = reserve(on_device(device), num_gpus, num_gpus > 0)
    assert [bundle.get("GPU", 0) for bundle in slots.demand.engines] == [reserved] * 3


def test_a_run_may_reserve_gpus_that_have_no_device_behind_them(reserve: Callable[..., list[NodeSlots]]) -> None:
    """As on a cluster to try things on: GRES of name only, no driver."""
    (slots,) = reserve(on_device("auto"), 4, False)
    assert slots.learner_options(0)["num_gpus"] == 1
