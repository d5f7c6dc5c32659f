"""Nodes whose agents are shell lines: they come up, fail or vanish as told, and start no Ray."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.errors import NodesUnavailableError
from hpc_grpo.launch.agent.protocol import NodeReport
from hpc_grpo.launch.supervisor import agent_link
from hpc_grpo.launch.supervisor import nodes as module
from hpc_grpo.launch.supervisor.attempt_setup import AttemptSetup
from hpc_grpo.launch.supervisor.nodes import Nodes, RayWatch
from hpc_grpo.launch.supervisor.transitions import Loss
from hpc_grpo.run.paths import RunDir
from tests.support.configs import minimal_config
from tests.support.full_disk import full_once
from tests.support.places import FakePlace, allocation

DEADLINE_S = 30.0
SERVES = "cat > /dev/null"
"""Until its lease ends."""
VANISHES = "echo 'srun: error: Aborting, Node failure on nid002' >&2; exit 1"
BREAKS = "echo 'Out of memory' >&2; exit 137"

MakeNodes = Callable[..., Nodes]


@pytest.fixture
def make_nodes(tmp_path: Path) -> Iterator[MakeNodes]:
    """Makes nodes, not yet started, whose agents run the given lines; `options` are those of the launch section."""
    made: list[Nodes] = []

    def make(*lines: str, **options: Any) -> Nodes:
        names = [f"nid{number:03}" for number in range(1, len(lines) + 1)]
        agents = dict(zip(names, lines, strict=True))

        def wrap(node: str, _command: Sequence[str]) -> list[str]:
            return ["sh", "-c", agents[node]]

        place = FakePlace(allocation(*names), wrap=wrap)
        launch = minimal_config(launch=options).launch
        made.append(Nodes(AttemptSetup(RunDir(tmp_path / "run"), launch, place, place.allocation(), 1, tmp_path)))
        return made[-1]

    yield make
    for nodes in made:
        nodes.tear_down(DEADLINE_S)


def bring_up_error(nodes: Nodes) -> NodesUnavailableError:
    """What keeps the nodes from coming up, as soon as it is known."""
    end = time.monotonic() + DEADLINE_S
    while (error := nodes.bring_up_error()) is None:
        assert time.monotonic() < end, f"after {DEADLINE_S:.0f} s no error"
        nodes.advance()
        time.sleep(0.01)
    return error


def test_a_node_whose_agent_ends_is_named_with_what_the_agent_said_last(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(SERVES, BREAKS)
    nodes.start()
    error = bring_up_error(nodes)
    assert str(error) == "Node nid002 did not come up: its agent ended with exit code 137: Out of memory"
    assert error.nodes == ("nid002",)


def test_after_the_deadline_the_nodes_that_are_not_in_ray_are_named(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(SERVES, SERVES, bringup_deadline_s=0.2)
    nodes.start()
    error = bring_up_error(nodes)
    assert error.nodes == ("nid001",), "the head comes first: without it the others were not asked"
    assert "launch.bringup_deadline_s gives more time." in str(error)


def test_nodes_hear_from_the_supervisor_while_another_is_slow_to_read_its_spec(
    make_nodes: MakeNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_link, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(agent_link, "SILENT_AGENT_S", 10.0)
    heard = tmp_path / "heard"
    slow = f"until [ -e {heard} ]; do sleep 0.05; done; {SERVES}"
    hears = f'read -r line; [ -n "$line" ] || touch {heard}; {SERVES}'
    nodes = make_nodes(slow, hears, env={"LARGER": "x" * (1 << 17), "THAN": "a pipe"})
    nodes.start()
    assert heard.exists()
    assert nodes.bring_up_error() is None


def test_the_token_is_readable_for_its_user_alone(make_nodes: MakeNodes, tmp_path: Path) -> None:
    make_nodes(SERVES).start()
    token = RunDir(tmp_path / "run").secret
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64


def test_a_token_that_is_found_is_not_used(make_nodes: MakeNodes, tmp_path: Path) -> None:
    token, elsewhere = RunDir(tmp_path / "run").secret, tmp_path / "known"
    token.parent.mkdir(mode=0o700, parents=True)
    elsewhere.write_text("known to another")
    token.symlink_to(elsewhere)
    make_nodes(SERVES).start()
    first = token.read_text()
    assert first != "known to another"
    assert (elsewhere.read_text(), token.is_symlink()) == ("known to another", False)
    make_nodes(SERVES).start()
    assert token.read_text() != first, "each attempt has its own"


@pytest.mark.parametrize(
    ("line", "awaits", "comes_back"), [(VANISHES, True, True), (BREAKS, True, False), (VANISHES, False, False)]
)
def test_a_node_that_is_gone_before_ray_is_up_may_come_back_where_the_place_waits_for_it(
    make_nodes: MakeNodes, line: str, awaits: bool, comes_back: bool
) -> None:
    nodes = make_nodes(SERVES, line)
    nodes._setup.place.awaits_lost_nodes = awaits
    nodes.start()
    bring_up_error(nodes)
    assert nodes.lost_may_come_back() == comes_back


@pytest.mark.parametrize(
    ("agents", "min_nodes", "left"),
    [
        pytest.param([SERVES, VANISHES], 1, ["nid001"], id="a node is gone, one is enough"),
        pytest.param([SERVES, VANISHES], None, None, id="a node is gone, all are needed"),
        pytest.param([SERVES, BREAKS], None, ["nid001", "nid002"], id="an agent died, its node answers"),
        pytest.param([VANISHES, SERVES], 1, None, id="the head is gone, where this process runs"),
    ],
)
def test_nodes_are_formed_anew_of_those_that_answer(
    make_nodes: MakeNodes, agents: list[str], min_nodes: int | None, left: list[str] | None
) -> None:
    nodes = make_nodes(*agents, min_nodes=min_nodes)
    nodes.start()
    bring_up_error(nodes)
    nodes.tear_down(DEADLINE_S)
    anew = nodes.anew(lambda: True)
    assert (anew and list(anew.names)) == left


def test_a_node_that_is_gone_is_told_from_an_agent_that_died(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(SERVES, VANISHES, BREAKS)
    nodes.start()
    nodes.tear_down(DEADLINE_S)
    lost = nodes.lost()
    assert (lost["nid002"].is_machine, lost["nid003"]) == (
        True,
        Loss("its agent ended with exit code 137: Out of memory"),
    )


def test_every_formation_has_names_of_its_own_on_its_nodes(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(SERVES, SERVES)
    nodes.start()
    nodes.tear_down(DEADLINE_S)
    anew = nodes.anew(lambda: True)
    assert anew is not None
    tags = [[one._setup.node_spec(node, "").tag for node in one.names] for one in (nodes, anew)]
    assert all(re.fullmatch(rf"17-{index}-[-\w]{{8}}", tag) for pair in tags for index, tag in enumerate(pair))
    assert len({tag for pair in tags for tag in pair}) == 4


def test_a_probe_waits_for_a_full_disk_and_what_ray_prints_beside_it_is_no_picture_of_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prints = "echo; echo 'WARNING: a node does not answer'; echo '{\"nodes\": {\"10.0.0.1\": 4}}'; sleep 60"
    monkeypatch.setattr(module, "own_command", lambda *_: ["bash", "-c", prints])
    refused = full_once(monkeypatch, "probe.log")
    watch = RayWatch("10.0.0.1:6379", dict(os.environ), tmp_path / "probe.log")
    up = NodeReport("up", "n1", ip="10.0.0.1", num_gpus=4)

    try:
        deadline = time.monotonic() + DEADLINE_S
        while watch.missing({"n1": up}) and time.monotonic() < deadline:
            watch.read()
            time.sleep(0.05)
        assert (watch.missing({"n1": up}), len(refused)) == ([], 1)
    finally:
        watch.close()
