from __future__ import annotations

import socket
from dataclasses import astuple

import pytest

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch import network


def test_ports_are_distinct_free_and_below_the_ephemeral_range() -> None:
    ports = network.choose_ports("job-1-0", 4)
    *fixed, first, last = astuple(ports)
    assert len({*fixed, *range(first, last + 1)}) == 7 + 64 + 2 * 4
    assert last < network._first_ephemeral_port()
    assert ports == network.choose_ports("job-1-0", 4)


def test_a_taken_port_moves_the_whole_block() -> None:
    before = network.choose_ports("job-2-0", 4)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", before.runtime_env))
        taken.listen()
        after = network.choose_ports("job-2-0", 4)
    assert set(range(after.gcs, after.last_worker + 1)).isdisjoint(range(before.gcs, before.last_worker + 1))


def test_skip_passes_over_free_blocks() -> None:
    assert network.choose_ports("job-3-0", 4, skip=1) != network.choose_ports("job-3-0", 4)


def test_different_jobs_look_at_different_places() -> None:
    assert len({network.choose_ports(f"{job}-1-0", 4).gcs for job in range(8)}) > 4


def test_an_unknown_interface_is_named_with_those_that_exist() -> None:
    with pytest.raises(LaunchError, match=r"launch\.interface = hsn9.*It has: "):
        network.choose_interface("hsn9")


def test_loopback_has_an_address() -> None:
    assert network.address_of("lo") == "127.0.0.1"
    assert network.address_of("nope0") is None


def test_the_default_route_with_the_lowest_metric_wins() -> None:
    table = (
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\n"
        "ib0\t00000000\t0100000A\t0003\t0\t0\t200\t00000000\n"
        "eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\n"
        "eth1\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\n"
    )
    assert network._default_route(table) == "eth0"
    assert network._default_route("Iface\n") == ""
