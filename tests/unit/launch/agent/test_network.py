from __future__ import annotations

import socket
from dataclasses import astuple

import pytest

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.agent import ray_command


def test_ports_are_distinct_free_and_below_the_ephemeral_range() -> None:
    ports = ray_command.choose_ports("job-1-0", 4)
    *fixed, first, last = astuple(ports)
    assert len({*fixed, *range(first, last + 1)}) == 7 + 64 + 2 * 4
    assert last < ray_command._ephemeral_ports().start
    assert ports == ray_command.choose_ports("job-1-0", 4)


def test_a_taken_port_moves_the_whole_block() -> None:
    before = ray_command.choose_ports("job-2-0", 4)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", before.runtime_env))
        taken.listen()
        after = ray_command.choose_ports("job-2-0", 4)
    assert set(range(after.gcs, after.last_worker + 1)).isdisjoint(range(before.gcs, before.last_worker + 1))


def test_skip_passes_over_free_blocks() -> None:
    assert ray_command.choose_ports("job-3-0", 4, skip=1) != ray_command.choose_ports("job-3-0", 4)


def test_the_dashboard_has_the_port_that_users_look_for_unless_it_is_taken_or_was_lost_before() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        wished = taken.getsockname()[1]
    drawn = ray_command.choose_ports("job-4-0", 4).dashboard
    assert ray_command.choose_ports("job-4-0", 4, dashboard=wished).dashboard == wished
    assert ray_command.choose_ports("job-4-0", 4, skip=1, dashboard=wished).dashboard != wished
    assert ray_command.choose_ports("job-4-0", 4, dashboard=0).dashboard == drawn
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", wished))
        taken.listen()
        assert ray_command.choose_ports("job-4-0", 4, dashboard=wished).dashboard == drawn


def test_different_jobs_look_at_different_places() -> None:
    assert len({ray_command.choose_ports(f"{job}-1-0", 4).gcs for job in range(8)}) > 4


@pytest.mark.parametrize(
    ("first", "last", "lowest", "highest"),
    [
        (32768, 60999, 10240, 32767),  # Linux as it comes
        (1024, 65535, 10240, 65535),  # nothing is left outside: among them
        (1024, 60999, 61000, 65535),
        (10300, 60999, 61000, 65535),  # less than a block is left below
        (10240, 65500, 10240, 65500),
        (1024, 4999, 10240, 65535),
        (32768, 65535, 10240, 32767),
    ],
)
def test_blocks_keep_off_the_ephemeral_range_where_there_is_room(
    first: int, last: int, lowest: int, highest: int
) -> None:
    stride, ephemeral = 100, range(first, last + 1)
    starts = list(ray_command.block_starts("job-4-0", stride, ephemeral))
    blocks = [range(start, start + stride) for start in starts]
    room = (highest + 1 - lowest) // stride
    assert sorted(starts[:room]) == list(range(lowest, highest - stride + 2, stride))
    assert all(block.start >= 10240 and block.stop <= 65536 for block in blocks)
    assert len({port for block in blocks for port in block}) == len(blocks) * stride
    among = [block[0] in ephemeral or block[-1] in ephemeral for block in blocks]
    assert among == sorted(among), "those outside come first"


def test_ports_are_found_where_every_port_is_ephemeral(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_command, "_ephemeral_ports", lambda: range(1024, 65536))
    ports = ray_command.choose_ports("job-5-0", 4)
    assert 10240 <= ports.gcs < ports.last_worker <= 65535


def test_an_unknown_interface_is_named_with_those_that_exist() -> None:
    with pytest.raises(LaunchError, match=r"launch\.interface = hsn9.*It has: "):
        ray_command.choose_interface("hsn9")


def test_loopback_has_an_address() -> None:
    assert str(ray_command._interfaces()["lo"]) == "127.0.0.1/8"


def test_an_interface_knows_its_network() -> None:
    assert ray_command.network_of("lo") == "127.0.0.0/8"
    assert ray_command.network_of("nope0") is None


def test_the_default_route_with_the_lowest_metric_wins() -> None:
    table = (
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\n"
        "ib0\t00000000\t0100000A\t0003\t0\t0\t200\t00000000\n"
        "eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\n"
        "eth1\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\n"
    )
    assert ray_command._default_route(table) == "eth0"
    assert ray_command._default_route("Iface\n") == ""
