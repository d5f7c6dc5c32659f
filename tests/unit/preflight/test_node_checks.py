"""Judging nodes: a good node gives ok everywhere, each bad fact the failure that belongs to it, with a fix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpc_grpo.preflight.node_checks import NodeNeeds, node_findings, shared_memory
from hpc_grpo.preflight.node_facts import NodeFacts
from hpc_grpo.system.gpus import Gpu

GPU = Gpu(0, "NVIDIA GH200 120GB", 12, 0)
GOOD = NodeFacts(
    node="nid001",
    host_address="10.1.2.3",
    interface="hsn0",
    address="10.1.2.3",
    num_cpus=288,
    num_usable_cpus=288,
    num_machine_cpus=288,
    free_port=11000,
    temp_dir="/tmp",
    temp_dir_system="tmpfs",
    temp_dir_free_gib=100.0,
    shm_free_gib=400.0,
    limits={"nofile": 1048576, "nproc": 600000, "memlock": -1, "as": -1},
    versions={"torch": "2.13.0"},
    num_gpus=2,
    gpus=(GPU, replace(GPU, index=1)),
    driver_cuda="12.7",
    wheel_cuda="12.6",
    caches={"TRITON_CACHE_DIR": "tmpfs"},
    has_slingshot=True,
    match_mode="software",
    has_vni=True,
)
NEEDS = NodeNeeds(gpus_per_node=2, worker_cpus=1.0, worker_gpus=2, store_gib=15.0, object_store_gib=16.0)


def test_a_good_node_gives_ok_everywhere() -> None:
    names = [
        "interface",
        "host name",
        "free ports",
        "temp folder",
        "launch.env",
        "/dev/shm",
        "limits",
        "cpus",
        "placement",
    ]
    names += ["gpus", "cuda", "compiler", "compile caches", "slingshot"]
    found = node_findings([GOOD], NEEDS)
    assert [(check, finding.status) for check, finding in found.items()] == [(n, "ok") for n in names]


@pytest.mark.parametrize(
    ("check", "status", "says", "facts"),
    [
        (
            "interface",
            "failure",
            "It has: eth0",
            {"interface_error": "launch.interface = hsn9. It has: eth0 (10.0.0.1)."},
        ),
        ("host name", "warning", "127.0.1.1", {"host_address": "127.0.1.1"}),
        ("host name", "warning", "does not resolve", {"host_address": ""}),
        (
            "launch.env",
            "failure",
            "LOCALDIR is not set",
            {"env_error": "launch.env.A = $LOCALDIR: LOCALDIR is not set."},
        ),
        ("free ports", "failure", "No 80 consecutive", {"ports_error": "No 80 consecutive free ports"}),
        (
            "temp folder",
            "failure",
            "107 bytes",
            {"temp_dir_error": "would exceed the 107 bytes a socket path may have"},
        ),
        ("temp folder", "failure", "is on lustre", {"temp_dir_system": "lustre"}),
        ("temp folder", "warning", "0.5 GiB free", {"temp_dir_free_gib": 0.5}),
        ("/dev/shm", "failure", "20.0 GiB free, the run needs 23.0", {"shm_free_gib": 20.0}),
        ("limits", "failure", "nofile is 1024", {"limits": {"nofile": 1024}}),
        ("limits", "failure", "nproc is 100", {"limits": {"nofile": -1, "nproc": 100}}),
        ("limits", "failure", "address space", {"limits": {"as": 2**33}}),
        ("limits", "warning", "ulimit -n is 1024", {"soft_nofile": 1024}),
        ("limits", "warning", "locked memory", {"limits": {"memlock": 65536}}),
        ("cpus", "failure", "pinned to 1 of 288", {"num_usable_cpus": 1}),
        ("placement", "failure", "reserve 1 CPUs, the job has 0", {"num_cpus": 0}),
        ("placement", "failure", "reserve 2 GPUs, the job has 1", {"num_gpus": 1}),
        ("placement", "failure", "reserve 2 GPUs, the job has 0", {"num_gpus": 0}),
        ("gpus", "failure", "no nvidia-smi", {"gpus": (), "gpus_error": "no nvidia-smi on PATH"}),
        ("gpus", "failure", "1 of 2 GPUs", {"gpus": (GPU,)}),
        ("gpus", "failure", "GPU 0 holds 70000 MiB", {"gpus": (replace(GPU, used_mib=70000), GPU)}),
        ("gpus", "failure", "at 97%", {"gpus": (replace(GPU, utilization=97), GPU)}),
        ("cuda", "failure", "built for CUDA 13.0, the driver runs up to 12.7", {"wheel_cuda": "13.0"}),
        ("cuda", "failure", "CPU build", {"wheel_cuda": ""}),
        ("cuda", "failure", "not installed", {"wheel_cuda": None}),
        ("compiler", "failure", "no C compiler", {"cannot_compile": "no C compiler (gcc or clang) on PATH"}),
        ("compiler", "skipped", "no GPU", {"cannot_compile": "no C compiler", "gpus": ()}),
        ("cuda", "warning", "does not say", {"driver_cuda": ""}),
        ("cuda", "ok", "12.9", {"wheel_cuda": "12.9"}),  # a newer minor version runs on the same major driver
        ("compile caches", "warning", "TRITON_CACHE_DIR (lustre)", {"caches": {"TRITON_CACHE_DIR": "lustre"}}),
        ("slingshot", "warning", "is not set", {"match_mode": ""}),
        ("slingshot", "skipped", "no such network", {"has_slingshot": False}),
        ("slingshot", "warning", "SLINGSHOT_VNIS is not set", {"has_vni": False}),
        ("gpus", "failure", "AMD GPUs (ROCm) are not supported", {"gpus": (), "gpus_error": "x", "has_rocm": True}),
    ],
)
def test_each_bad_fact_has_its_finding_and_no_other(check: str, status: str, says: str, facts: dict[str, Any]) -> None:
    findings = node_findings([replace(GOOD, **facts)], NEEDS)
    found = findings.pop(check)
    assert found.status == status
    assert says in found.says
    assert bool(found.fix) == (status in ("warning", "failure"))
    if "gpus" not in facts:
        assert {other.status for other in findings.values()} == {"ok"}


def test_gpus_may_be_absent_where_none_is_wanted() -> None:
    cpu_node = replace(GOOD, num_gpus=0, gpus=(), gpus_error="no nvidia-smi on PATH", wheel_cuda="", driver_cuda="")
    found = node_findings([cpu_node], NodeNeeds())
    assert (found["gpus"].status, found["cuda"].status) == ("skipped", "skipped")
    wanting = node_findings([cpu_node], NodeNeeds(device="cuda"))
    assert wanting["gpus"].status == "failure"
    unaware = node_findings([cpu_node], NodeNeeds(device="auto"))["gpus"]
    assert (unaware.status, "computes on CPUs" in unaware.says) == ("warning", True)


def test_amd_gpus_are_named_once_also_where_none_is_wanted() -> None:
    amd = replace(GOOD, num_gpus=0, gpus=(), gpus_error="no nvidia-smi on PATH", wheel_cuda="", has_rocm=True)
    found = {check: own for check, own in node_findings([amd], NodeNeeds()).items() if own.status != "ok"}
    assert [(check, finding.status) for check, finding in found.items()] == [
        ("gpus", "warning"),
        ("cuda", "skipped"),
        ("compiler", "skipped"),
    ]
    assert "AMD GPUs (ROCm) are not supported" in found["gpus"].says


def test_the_object_store_takes_at_most_its_share_of_shared_memory() -> None:
    small = replace(GOOD, shm_free_gib=10.0)
    assert shared_memory(small, NodeNeeds(store_gib=6.0, object_store_gib=16.0)).status == "ok"
    assert shared_memory(small, NodeNeeds(store_gib=6.1, object_store_gib=16.0)).status == "failure"


def test_nodes_share_a_line_and_the_worst_is_named() -> None:
    others = [replace(GOOD, node=f"nid{i:03d}") for i in range(2, 9)]
    lines = node_findings([GOOD, *others], NEEDS)
    assert lines["cuda"].says == "driver runs CUDA 12.7, torch is built for 12.6, on all 8 nodes"
    bad = replace(GOOD, node="nid009", num_usable_cpus=1)
    lines = node_findings([GOOD, *others, bad], NEEDS)
    assert (lines["cpus"].status, lines["cpus"].says) == ("failure", "nid009: pinned to 1 of 288 CPUs")
