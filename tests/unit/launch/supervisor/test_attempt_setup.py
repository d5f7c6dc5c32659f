from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.launch.agent.protocol import Stage
from hpc_grpo.launch.agent.stage import version_of
from hpc_grpo.launch.supervisor.attempt_setup import AttemptSetup, needed_everywhere, stage_of
from hpc_grpo.run.compiled import archive_of
from hpc_grpo.run.contract import KEEPS_ENGINES_VARIABLE
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


@pytest.mark.parametrize(("is_attended", "keeps"), [(False, "1"), (True, None)])
def test_engines_are_kept_where_a_crashed_driver_is_started_again(is_attended: bool, keeps: str | None) -> None:
    place = FakePlace(allocation("n1"))
    place.is_attended = is_attended
    setup = AttemptSetup(RunDir(Path("/run")), LaunchConfig(), place, place.nodes, 1, Path("/w"))
    assert setup.contract_environment().get(KEEPS_ENGINES_VARIABLE) == keeps


def test_models_and_what_rewards_are_given_are_needed_on_every_node_and_data_is_not(tmp_path: Path) -> None:
    for name in ("model", "judge", "rows"):
        (tmp_path / name).mkdir()
    rewards = [{"name": "short", "args": {"judge": str(tmp_path / "judge"), "url": "/score", "limit": 3}}]
    config = minimal_config(
        model={"path": str(tmp_path / "model")},
        data={"train": {"path": str(tmp_path / "rows")}},
        rewards=rewards,
        task={"name": "distill", "args": {"teacher": "Qwen/Qwen2.5-7B"}},
        loss={"kl": {"coef": 0.1, "reference": str(tmp_path / "judge")}},
    )
    assert needed_everywhere(config, time.time() + 60) == {
        "model.path": str(tmp_path / "model"),
        "loss.kl.reference": str(tmp_path / "judge"),
        "rewards.0.args.judge": str(tmp_path / "judge"),
    }


def test_of_what_rewards_are_given_a_cache_they_write_is_needed_nowhere_and_lists_are_looked_into(
    tmp_path: Path,
) -> None:
    for name in ("model", "words", "more", "cache"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1000.0, 1000.0))
    (tmp_path / "cache" / "filled").touch()
    lists = [[str(tmp_path / "words")], str(tmp_path / "more"), "/nowhere", "/no_think " + "Think less. " * 50, 3]
    rewards = [{"name": "short", "args": {"cache": str(tmp_path / "cache"), "files": lists}}]
    config = minimal_config(model={"path": str(tmp_path / "model")}, rewards=rewards)
    os.utime(tmp_path / "model")  # saved anew since: still what every node reads
    assert needed_everywhere(config, begun_at=2000.0) == {
        "model.path": str(tmp_path / "model"),
        "rewards.0.args.files.0": str(tmp_path / "words"),
        "rewards.0.args.files.1": str(tmp_path / "more"),
    }


def test_a_run_stages_what_its_config_names_from_where_it_was_submitted(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").touch()
    staging = {"environment": "env.squashfs", "model": True}
    config = minimal_config(run={"root": str(tmp_path)}, model={"path": "m"}, launch={"stage": staging})
    stage = stage_of(config, tmp_path, {})
    version = version_of(tmp_path / "env.squashfs", tmp_path / "m")
    assert stage == Stage(str(tmp_path / "env.squashfs"), str(tmp_path / "m"), str(archive_of(config)), version)
    assert stage_of(minimal_config(task={"name": "sft"}), tmp_path, {}) == Stage()
