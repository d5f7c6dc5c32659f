"""What Slurm 22.05 prints, read and judged."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_grpo.config import LaunchConfig, SlurmConfig
from hpc_grpo.preflight import login
from hpc_grpo.system.commands import Answer

_REST = "DefaultTime=NONE Hidden=NO MaxNodes=UNLIMITED OverTimeLimit=NONE SelectTypeParameters=NONE JobDefaults=(null)"
PARTITIONS = Answer(
    f"PartitionName=workq AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A MaxTime=1-00:00:00 "
    f"Nodes=nid[001-002] State=UP TotalCPUs=16 TotalNodes=2 TRES=cpu=16,mem=24000M,node=2,gres/gpu=8 {_REST}\n"
    f"PartitionName=closed AllowAccounts=proj.b DenyAccounts=proj.c Default=NO MaxTime=UNLIMITED State=DOWN "
    f"TotalNodes=2 TRES=cpu=16,node=2 {_REST}\n"
    f"PartitionName=cpu AllowAccounts=proj.b Default=NO MaxTime=00:30:00 State=UP TotalNodes=2 TRES=cpu=16 {_REST}\n"
)
ASSOCIATIONS = Answer("proj.a||\nproj.b|workq|12:00:00\n|workq|01:00:00\n")


def launch(**slurm: Any) -> LaunchConfig:
    return LaunchConfig(slurm=SlurmConfig(**slurm))


@pytest.mark.parametrize(
    ("slurm", "num_nodes", "status", "says"),
    [
        ({"partition": "workq", "gpus_per_node": 4}, 2, "ok", "workq is up: 2 nodes, 8 GPUs"),
        ({"gpus_per_node": 1}, 1, "ok", "workq is up"),
        ({"partition": "nope"}, 1, "failure", "there is no partition nope"),
        ({"partition": "closed"}, 1, "failure", "closed is DOWN"),
        ({"gpus_per_node": 4}, 3, "failure", "workq has 2 nodes, 2 per job; 3 are requested"),
        ({"gpus_per_node": 5}, 2, "failure", "workq has 8 GPUs, 10 are requested"),
        ({}, 1, "warning", "none is requested"),
        ({"extra": {"exclusive": True}}, 1, "ok", "workq is up"),
    ],
)
def test_a_partition_that_cannot_take_the_job_is_a_failure_that_names_the_others(
    slurm: dict[str, Any], num_nodes: int, status: str, says: str
) -> None:
    found = login.partition_finding(launch(**slurm), PARTITIONS, num_nodes)
    assert found.status == status
    assert says in found.says
    assert bool(found.fix) == (status != "ok")
    if status == "failure":
        assert "workq, closed, cpu" in found.fix


@pytest.mark.parametrize(
    ("printed", "status", "says"),
    [
        ("slurm-wlm 22.05.8\n", "ok", "22.05 and newer are supported"),
        ("slurm 25.11.0\n", "ok", "slurm 25.11.0"),
        ("slurm 21.08.8-2\n", "warning", "Slurm 21.08 is older than 22.05"),
        ("a wrapper\n", "skipped", "names no version"),
    ],
)
def test_a_slurm_older_than_the_oldest_that_is_tested_is_a_warning(printed: str, status: str, says: str) -> None:
    found = login.version_finding(Answer(printed))
    assert (found.status, says in found.says) == (status, True)


@pytest.mark.parametrize(
    ("slurm", "status", "says"),
    [
        ({"account": "proj.a"}, "ok", "proj.a is yours"),
        ({"account": "PROJ.A"}, "ok", "PROJ.A is yours"),
        ({}, "ok", "proj.a, proj.b"),
        ({"account": "proj.x"}, "failure", "not one of your accounts"),
        ({"account": "proj.a", "partition": "cpu"}, "failure", "cpu does not accept proj.a"),
    ],
)
def test_an_account_must_be_the_users_and_one_that_the_partition_takes(
    slurm: dict[str, Any], status: str, says: str
) -> None:
    found = login.account_finding(launch(**slurm), ASSOCIATIONS, PARTITIONS)
    assert found.status == status
    assert says in found.says
    assert bool(found.fix) == (status != "ok")


def test_a_wrong_account_is_told_those_that_are_valid() -> None:
    assert "proj.a, proj.b" in login.account_finding(launch(account="x"), ASSOCIATIONS, PARTITIONS).fix
    assert login.account_finding(launch(), Answer(""), PARTITIONS).status == "warning"


@pytest.mark.parametrize(
    ("slurm", "limit"),
    [
        ({"time_min": 1440, "account": "proj.a"}, None),
        ({"time_min": 1441}, "partition workq allows: 1440 min"),
        ({"time_min": 721, "account": "proj.b"}, "account proj.b allows: 720 min"),
        ({"time_min": 31, "partition": "cpu", "account": "proj.b"}, "partition cpu allows: 30 min"),
        ({"time_min": 9999, "partition": "closed"}, None),
        ({"time_min": 99}, None),
    ],
)
def test_the_walltime_is_within_what_partition_and_account_allow(slurm: dict[str, Any], limit: str | None) -> None:
    found = login.walltime_finding(launch(**slurm), PARTITIONS, ASSOCIATIONS)
    assert found.status == ("ok" if limit is None else "failure")
    assert limit is None or limit in found.says
    assert bool(found.fix) == (limit is not None)


def test_commands_that_are_absent_are_skipped_and_those_that_fail_are_not() -> None:
    absent, broken = Answer(error="no scontrol on PATH", is_absent=True), Answer(error="scontrol ended with 1: down")
    assert login.partition_finding(launch(), absent, 1).status == "skipped"
    found = login.partition_finding(launch(), broken, 1)
    assert (found.status, found.says) == ("failure", "scontrol ended with 1: down")
    assert found.fix
    # A site may do without accounting.
    assert login.account_finding(launch(), Answer(error="sacctmgr ended with 1"), PARTITIONS).status == "skipped"
