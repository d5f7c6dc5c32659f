"""A job that its partition would never start is refused before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpc_grpo.cli import main
from hpc_grpo.config import LaunchConfig, SlurmConfig
from hpc_grpo.errors import EXIT_CONFIG, ConfigError
from hpc_grpo.launch.place.slurm import partition
from hpc_grpo.launch.place.slurm.partition import parse_partitions, refuse_what_cannot_start
from hpc_grpo.system.commands import Answer

SHOWN = (
    "PartitionName=workq Default=YES MaxNodes=2 MaxTime=1-00:00:00 State=UP TotalNodes=9\n"
    "PartitionName=large Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP TotalNodes=40\n"
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def ask_partitions() -> Answer:
        calls.append("partitions")
        return Answer(SHOWN)

    monkeypatch.setattr(partition, "ask_partitions", ask_partitions)
    return calls


def test_partitions_are_read_with_their_nodes_gpus_and_limits() -> None:
    rest = "DefaultTime=NONE Hidden=NO MaxNodes=UNLIMITED OverTimeLimit=NONE JobDefaults=(null)"
    shown = (
        "PartitionName=workq AllowAccounts=ALL Default=YES QoS=N/A MaxTime=1-00:00:00 Nodes=nid[001-002] State=UP "
        f"TotalCPUs=16 TotalNodes=2 TRES=cpu=16,mem=24000M,node=2,gres/gpu=8 {rest}\n"
        f"PartitionName=closed Default=NO MaxTime=UNLIMITED State=DOWN TotalNodes=2 TRES=cpu=16,node=2 {rest}\n"
    )
    found = parse_partitions(shown)
    assert [(p.name, p.num_nodes, p.num_gpus, p.max_minutes, p.is_default) for p in found] == [
        ("workq", 2, 8, 1440, True),
        ("closed", 2, None, None, False),
    ]
    assert parse_partitions("") == []


def test_the_most_nodes_of_a_job_are_the_partitions_limit_or_all_it_has() -> None:
    assert [found.max_nodes for found in parse_partitions(SHOWN)] == [2, 40]


def launch(num_nodes: int, **slurm: Any) -> LaunchConfig:
    return LaunchConfig(num_nodes=num_nodes, slurm=SlurmConfig(**slurm))


@pytest.mark.parametrize(
    ("asked_for", "words"),
    [
        (launch(3), ["launch.num_nodes", "3", "workq", "at most 2", "large (at most 40)"]),
        (launch(41, partition="large"), ["launch.num_nodes", "41", "at most 40"]),
        (launch(1, time_min=1441), ["time_min", "1441", "--time 1440", "follow-on jobs continue the run"]),
    ],
)
def test_what_cannot_start_is_refused(asked_for: LaunchConfig, words: list[str], asked: list[Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        refuse_what_cannot_start(asked_for)
    for word in words:
        assert word in str(raised.value)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "asked_for",
    [
        launch(2, time_min=1440),
        launch(40, time_min=9999, partition="large"),
        launch(3, extra={"qos": "long"}),
        launch(3, partition="workq,large"),
        launch(1, partition="unknown"),
    ],
)
def test_what_may_start_is_left_to_sbatch(asked_for: LaunchConfig, asked: list[Any]) -> None:
    refuse_what_cannot_start(asked_for)


def test_a_slurm_that_does_not_answer_is_left_to_sbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "ask_partitions", lambda: Answer(error="scontrol failed"))
    refuse_what_cannot_start(launch(1000))


def test_submit_refuses_and_leaves_no_run(tmp_path: Path, asked: list[Any]) -> None:
    without_data = ["data.train.path=org/rows", "eval.every=null"]
    done = CliRunner().invoke(main, ["submit", "local/debug", *without_data, f"run.root={tmp_path}", "--nodes", "3"])
    assert done.exit_code == EXIT_CONFIG
    assert "launch.num_nodes (--nodes) = 3" in done.stderr
    assert list(tmp_path.iterdir()) == []
