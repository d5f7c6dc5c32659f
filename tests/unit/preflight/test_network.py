"""Judging what is between nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_grpo.preflight import network as judge
from hpc_grpo.preflight.network import Measured
from hpc_grpo.preflight.node_facts import NodeFacts

OFI = "AWS Libfabric"


def both(found: Measured) -> dict[str, Measured]:
    return {"nid001": found, "nid002": found}


def test_a_canary_that_is_not_seen_names_the_node_and_the_folder() -> None:
    assert judge.canary("nid001", "/runs", {"nid002": True, "nid003": True}).status == "ok"
    found = judge.canary("nid001", "/runs", {"nid002": True, "nid003": False})
    assert (found.status, found.says) == ("failure", "nid003 cannot read what nid001 wrote in /runs")
    assert "run.root" in found.fix


@pytest.mark.parametrize(("skew_s", "status"), [(0.3, "ok"), (3.0, "warning"), (60.0, "failure")])
def test_clocks_of_nodes_are_compared_with_each_other(skew_s: float, status: str) -> None:
    # All nodes may differ from the machine that asks.
    found = judge.clocks({"nid001": 500.0, "nid002": 500.0 + skew_s, "nid003": 500.0})
    assert found.status == status
    assert f"differ by {skew_s:.1f} s" in found.says
    assert ("nid002" in found.says) == (status != "ok")


def test_versions_must_be_equal_on_all_nodes() -> None:
    same = [NodeFacts(name, versions={"torch": "2.13.0", "ray": "2.60.0"}) for name in ("nid001", "nid002")]
    assert judge.versions(same).says == "equal on both nodes: ray 2.60.0, torch 2.13.0"
    found = judge.versions([*same, NodeFacts("nid003", versions={"torch": "2.12.0"})])
    assert found.status == "failure"
    assert "torch: nid001 has 2.13.0, nid002 has 2.13.0, nid003 has 2.12.0" in found.says
    assert "nid003 has none" in found.says
    assert found.fix


def test_gloo_reports_the_slowest_node_and_what_broke() -> None:
    found = judge.gloo({"nid001": Measured(gloo_gb_per_s=2.0), "nid002": Measured(gloo_gb_per_s=1.5)})
    assert (found.status, found.says) == ("ok", "all-reduce at 1.50 GB/s between 2 nodes")
    assert judge.gloo(both(Measured(gloo_gb_per_s=0.01))).status == "warning"
    broken = judge.gloo({"nid001": Measured(gloo_gb_per_s=2.0), "nid002": Measured(error="Connection refused")})
    assert (broken.status, broken.says) == ("failure", "nid002: Connection refused")
    assert "launch.interface" in broken.fix


def test_nccl_over_its_plugin_is_ok_and_named() -> None:
    found = judge.nccl(both(Measured(4, 1.0, 22.0, nccl_network=OFI)), "AWS Libfabric")
    assert (found.status, found.says) == (
        "ok",
        "all-reduce at 22.0 GB/s over AWS Libfabric with one GPU of each node",
    )


@pytest.mark.parametrize(
    ("measured", "wanted", "status", "says"),
    [
        (Measured(4, 1.0, 22.0, nccl_network="Socket"), "AWS Libfabric", "failure", "but NCCL_NET is AWS Libfabric"),
        (Measured(4, 1.0, 3.0, nccl_network="Socket"), None, "warning", "fallen back to TCP"),
        (Measured(4, 1.0, 3.0, nccl_network=OFI), None, "warning", "3.0 GB/s"),
        (Measured(4, 1.0, None, OFI, "unhandled system error"), None, "failure", "unhandled system error"),
        (Measured(0, 1.0), None, "skipped", "no GPU"),
    ],
)
def test_nccl_without_its_plugin_is_a_warning_or_a_failure_where_it_was_asked_for(
    measured: Measured, wanted: str | None, status: str, says: str
) -> None:
    found = judge.nccl(both(measured), wanted)
    assert found.status == status
    assert says in found.says
    assert bool(found.fix) == (status != "skipped")


LIBRARY, PLUGIN = "/opt/nccl/lib/libnccl.so.2", "/opt/ofi/lib/libnccl-net.so"
IN_USE = Measured(4, 1.0, 22.0, OFI, nccl_version="2.28.3", nccl_library=LIBRARY, nccl_plugin=PLUGIN)


def test_the_nccl_in_use_is_named_with_its_plugin() -> None:
    found = judge.nccl_library(both(IN_USE))
    assert (found.status, found.says) == ("ok", f"2.28.3 in {LIBRARY}; network plugin: {PLUGIN}")


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (both(replace(IN_USE, nccl_plugin="")), f"2.28.3 in {LIBRARY}; network plugin: none"),
        ({"a": replace(IN_USE, nccl_plugin="")}, f"2.28.3 in {LIBRARY}; network plugin: not loaded on one node"),
        (both(replace(IN_USE, nccl_library="")), f"2.28.3 in torch itself; network plugin: {PLUGIN}"),
    ],
)
def test_what_of_nccl_is_not_there_is_said(measured: dict[str, Measured], says: str) -> None:
    assert (judge.nccl_library(measured).status, judge.nccl_library(measured).says) == ("ok", says)


def test_a_torch_for_cpus_has_no_nccl() -> None:
    found = judge.nccl_library(both(Measured(0, 1.0)))
    assert (found.status, found.says) == ("skipped", "none: this torch is built without NCCL")


@pytest.mark.parametrize(
    "other", [{"nccl_version": "2.27.5"}, {"nccl_library": "/usr/lib/libnccl.so.2"}, {"nccl_plugin": ""}]
)
def test_nodes_with_another_nccl_are_a_failure(other: dict[str, str]) -> None:
    found = judge.nccl_library({"nid001": IN_USE, "nid002": replace(IN_USE, **other)})
    assert found.status == "failure"
    assert found.says.startswith(f"nid001: 2.28.3 in {LIBRARY}; network plugin: {PLUGIN}; nid002: ")
    assert "launch.modules" in found.fix


def test_nodes_on_different_networks_are_a_failure() -> None:
    found = judge.nccl({"a": Measured(4, 1.0, 9.0, OFI), "b": Measured(4, 1.0, 9.0, "Socket")}, None)
    assert found.status == "failure"
    assert "AWS Libfabric, Socket" in found.says


def test_torch_must_see_the_gpus_that_are_listed() -> None:
    assert judge.torch_gpus(both(Measured(0)), {"nid001": 0, "nid002": 0}).status == "skipped"
    assert judge.torch_gpus(both(Measured(4)), {"nid001": 4, "nid002": 4}).status == "ok"
    found = judge.torch_gpus({"nid001": Measured(4), "nid002": Measured(0)}, {"nid001": 4, "nid002": 4})
    assert (found.status, found.says) == ("failure", "nid002: torch sees 0 of 4 GPUs")
    assert found.fix


def test_with_one_node_what_is_between_nodes_is_skipped() -> None:
    alone = {"nid001": Measured(4)}
    assert (judge.gloo(alone).status, judge.nccl(alone, None).status) == ("skipped", "skipped")


def test_the_network_is_read_from_nccls_log() -> None:
    log = [
        "nid001:7:9 [0] NCCL INFO NET/Plugin: Loaded net plugin AWS Libfabric (v8)",
        "nid001:7:9 [0] NCCL INFO Using network AWS Libfabric",
    ]
    assert judge.nccl_network(log) == "AWS Libfabric"
    socket = ["n:7:9 [0] NCCL INFO NET/Socket : Using [0]hsn0:10.1.2.3<0>", "n:7:9 [0] NCCL INFO Using network Socket"]
    assert judge.nccl_network(socket) == "Socket"
    assert judge.nccl_network([]) == ""
