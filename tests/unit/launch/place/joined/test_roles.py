from __future__ import annotations

import socket

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.place.joined.roles import Role, by_hand, find_role, node_name


def test_by_hand_the_number_of_workers_counts_with_the_head_and_its_port() -> None:
    told = {"RAY_HEAD_IP": "192.0.2.77", "RAY_HEAD_PORT": "12345", "EXPECTED_WORKERS": "3"}
    role = by_hand(told)
    assert (role.is_head, role.head, role.num_nodes, role.port) == (False, "192.0.2.77", 4, 12345)


def test_the_address_that_debian_gives_the_machines_own_name_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    assert find_role({"RAY_HEAD_IP": "ws1.lab.org"}).is_head


SKY = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
DSTACK = {"DSTACK_MASTER_NODE_IP": "10.0.0.1", "DSTACK_NODES_NUM": "3"}
CLUSTER = {"PRIMARY_ADDR": "10.65.0.2", "NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environ", "role"),
    [
        ({}, (True, "", None, None)),
        ({"HEAD_POD_ID": "abc123"}, (True, "abc123.runpod.internal", None, None)),
        ({"RAY_WORKER": "0", "EXPECTED_WORKERS": "3"}, (True, "", 4, None)),
        ({"RAY_WORKER": "1", "HEAD_POD_ID": "abc123"}, (False, "abc123.runpod.internal", None, None)),
        ({**SKY, "SKYPILOT_NODE_RANK": "0"}, (True, "10.0.0.1", 2, None)),
        ({**SKY, "SKYPILOT_NODE_RANK": "1"}, (False, "10.0.0.1", 2, None)),
        ({**DSTACK, "DSTACK_NODE_RANK": "2"}, (False, "10.0.0.1", 3, None)),
        ({"DSTACK_NODE_RANK": "0", "DSTACK_NODES_NUM": "1"}, (True, "", 1, None)),  # of one node no address is told
        ({**CLUSTER, "NODE_RANK": "1"}, (False, "10.65.0.2", 2, None)),
        ({"RAY_HEAD_IP": "127.0.0.1"}, (True, "127.0.0.1", None, 10001)),
        ({"RAY_HEAD_IP": "192.0.2.77", "RAY_HEAD_PORT": "7000"}, (False, "192.0.2.77", None, 7000)),
    ],
)
def test_the_role_is_read_from_the_variables_of_the_provider(
    environ: dict[str, str], role: tuple[bool, str, int | None, int | None]
) -> None:
    found = find_role(environ)
    assert found == Role(*role, default_nodes=found.default_nodes)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RAY_WORKER": "yes"}, "RAY_WORKER"),
        ({"RAY_WORKER": "1"}, "HEAD_POD_ID"),
        ({"RAY_WORKER": "0", "EXPECTED_WORKERS": "two"}, "EXPECTED_WORKERS"),
        ({"DSTACK_NODE_RANK": "1"}, "DSTACK_MASTER_NODE_IP"),
    ],
)
def test_a_variable_that_says_nothing_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        find_role(environ)


def test_a_pod_goes_by_its_id_and_a_host_by_its_name() -> None:
    assert node_name({"RUNPOD_POD_ID": "abc123"}) == "abc123"
    assert node_name({}) == socket.gethostname().partition(".")[0]
