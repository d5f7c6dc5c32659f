from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.launch.supervisor.attempt_setup import AttemptSetup, needed_everywhere
from hpc_grpo.run.paths import RunDir
from tests.support.configs import minimal_config
from tests.support.places import FakePlace, allocation


@pytest.mark.parametrize(("asks", "port"), [(True, 8265), (False, None)])
def test_only_the_head_is_to_have_a_dashboard_at_the_port_of_its_place(asks: bool, port: int | None) -> None:
    place = FakePlace(allocation("n1", "n2"))
    place.dashboard_port = 8265
    launch = LaunchConfig(ray_dashboard=asks)
    setup = AttemptSetup(RunDir(Path("/run")), launch, place, place.nodes, 1, Path("/w"))
    assert setup.node_spec("n1", "").dashboard_port == port
    assert setup.node_spec("n2", "10.0.0.1:6379").dashboard_port is None


def test_models_and_what_rewards_are_given_are_needed_on_every_node_and_data_is_not(tmp_path: Path) -> None:
    for name in ("model", "judge", "rows"):
        (tmp_path / name).mkdir()
    rewards = [{"name": "short", "args": {"judge": str(tmp_path / "judge"), "url": "/score", "limit": 3}}]
    config = minimal_config(
        model={"path": str(tmp_path / "model")},
        data={"train": {"path": str(tmp_path / "rows")}},
        rewards=rewards,
        distill={"teacher": "Qwen/Qwen2.5-7B"},
    )
    assert needed_everywhere(config) == {
        "model.path": str(tmp_path / "model"),
        "rewards.0.args.judge": str(tmp_path / "judge"),
    }
