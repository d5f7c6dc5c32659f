"""The doctor's processes on nodes: two on this machine play two nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.launch.agent.protocol import NodeSpec
from hpc_grpo.launch.agent.ray_command import choose_ports
from hpc_grpo.preflight.findings import Context
from hpc_grpo.preflight.folders import own_folder
from hpc_grpo.preflight.network import Measured, gloo
from hpc_grpo.preflight.node_facts import FACTS, gather
from hpc_grpo.preflight.nodes import NodeLinks, examine, needs_of
from tests.support.configs import minimal_config
from tests.support.places import FakePlace, allocation

TWO = ("n1", "n2")
PLACE = FakePlace(allocation(*TWO), queue=None)
SPECS = [NodeSpec(node, "t", "", "", "", "", None, True, None, 1.0) for node in TWO]


@pytest.fixture
def nodes() -> Iterator[NodeLinks]:
    asked = NodeLinks(PLACE, SPECS)
    yield asked
    asked.close(5.0)


def test_facts_come_over_the_wire_as_they_were_gathered(nodes: NodeLinks) -> None:
    reply = nodes.ask({"n1": {"ask": "facts"}}, 60.0)["n1"]
    assert reply.error == ""
    facts, here = FACTS.validate_python(reply.value), gather(SPECS[0])
    assert (facts.interface, facts.address) == ("lo", "127.0.0.2")
    assert facts.versions == here.versions
    assert facts.limits == here.limits
    assert facts.wheel_cuda == here.wheel_cuda
    assert 0 < facts.num_usable_cpus <= facts.num_machine_cpus


def test_a_canary_is_written_by_one_and_read_by_the_other(nodes: NodeLinks, tmp_path: Path) -> None:
    file = {"path": str(tmp_path / "new" / "canary"), "text": "tweet"}
    assert nodes.ask({"n1": {"ask": "write_canary", **file}}, 60.0)["n1"].error == ""
    assert nodes.ask({"n2": {"ask": "read_canary", **file, "wait_s": 1.0}}, 60.0)["n2"].value is True
    stale = {**file, "text": "an older one", "wait_s": 0.0}
    assert nodes.ask({"n2": {"ask": "read_canary", **stale}}, 60.0)["n2"].value is False
    refused = nodes.ask({"n1": {"ask": "write_canary", **file, "path": "/proc/canary"}}, 60.0)["n1"]
    assert "Error" in refused.error


def test_a_node_that_does_not_answer_is_not_waited_for_twice(nodes: NodeLinks) -> None:
    hangs = {"ask": "read_canary", "path": "/nowhere", "text": "", "wait_s": 600.0}
    assert nodes.ask({"n1": hangs}, 1.0)["n1"].error == "no answer within 1 s"
    replies = nodes.ask({"n1": {"ask": "clock"}, "n2": {"ask": "clock"}}, 600.0)  # far beyond the test's patience
    assert replies["n1"].error == "no answer within 1 s"
    assert replies["n2"].sent <= replies["n2"].value <= replies["n2"].received
    nodes.close(0.1)


def test_a_process_that_dies_gives_its_last_words_as_error() -> None:
    command = ["bash", "-c", "echo 'srun: error: no such node' >&2; exit 3"]
    asked = NodeLinks(replace(PLACE, wrap=lambda *_: command), SPECS)
    replies = asked.ask({node: {"ask": "clock"} for node in TWO}, 60.0)
    asked.close(5.0)
    assert {reply.error for reply in replies.values()} == {"it ended with 3: srun: error: no such node"}


def test_dead_nodes_are_findings_and_what_is_between_them_is_skipped(tmp_path: Path) -> None:
    place = replace(PLACE, wrap=lambda *_: ["false"])
    groups = examine(place, TWO, Context(None, LaunchConfig(), {}), own_folder(tmp_path))
    assert [*groups] == ["nodes", "between nodes"]
    assert {check: finding.status for check, finding in groups["nodes"].items()} == {"answers": "failure"}
    assert groups["nodes"]["answers"].fix
    assert {finding.status for finding in groups["between nodes"].values()} == {"skipped"}
    assert list(tmp_path.iterdir()) == []


def test_gloo_is_measured_between_two_processes(nodes: NodeLinks) -> None:
    port = choose_ports("doctor-test", 1).gcs
    probe = {"world_size": 2, "host": "127.0.0.1", "port": port, "num_bytes": 2**20, "timeout_s": 60.0}
    requests = {
        node: {"ask": "measure", "probe": {**probe, "rank": rank}, "deadline_s": 80.0} for rank, node in enumerate(TWO)
    }
    measured = {node: Measured(**reply.value) for node, reply in nodes.ask(requests, 90.0).items()}
    assert [found.error for found in measured.values()] == ["", ""]
    assert gloo(measured).says.endswith("GB/s between 2 nodes")
    assert all(found.gloo_gb_per_s and found.gloo_gb_per_s > 0 for found in measured.values())


def test_a_probe_that_dies_gives_its_last_words_as_error(nodes: NodeLinks) -> None:
    probe = {"rank": 0, "world_size": 2, "host": "192.0.2.1", "port": 1, "num_bytes": 4, "timeout_s": 5.0}
    request = {"ask": "measure", "probe": probe, "deadline_s": 60.0}
    found = Measured(**nodes.ask({"n1": request}, 70.0)["n1"].value)
    assert found.gloo_gb_per_s is None
    assert "annot assign requested address" in found.error


def test_the_weights_of_the_config_count_as_needed(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 1000, **shape}))

    def store_gib(**model: str) -> float | None:
        settings = {"path": str(tmp_path), "dtype": "float32", **model}
        config = minimal_config(model=settings)
        return needs_of(Context(config, config.launch, {}), is_job=True).store_gib

    whole = store_gib()
    assert whole
    assert store_gib(dtype="bfloat16") == whole / 2
    assert store_gib(path="not/here") is None
