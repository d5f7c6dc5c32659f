from __future__ import annotations

import os
import time

from hpc_grpo.launch.agent.protocol import HEAD, Lease, NodeReport, NodeSpec, Order, Stage, report_from_line

SPEC = NodeSpec(
    "n1", "17-1-0", "", "/token", "/logs", "/work", None, True, None, 1.0, env={"A": "b"}, stage=Stage("/env")
)


def test_the_spec_is_read_past_heartbeats_and_in_pieces() -> None:
    reader, writer = os.pipe()
    line = SPEC.to_line()
    os.write(writer, b"\n\n" + line)
    assert Lease(reader).wait_for_spec() == SPEC
    os.close(writer)
    assert Lease(reader).wait_for_spec() is None
    os.close(reader)


def test_a_joining_node_is_told_the_heads_address_between_orders() -> None:
    reader, writer = os.pipe()
    lease = Lease(reader)
    os.write(writer, b"\n" + Order.STACKS.value + HEAD + b"10.0.0.1:63")
    assert lease.check(60.0, 1.0)
    assert (lease.take_orders(), lease.head_address) == ([Order.STACKS], "")
    os.write(writer, b"79\n" + Order.LET_GO.value)
    assert lease.check(60.0, 1.0)
    assert (lease.take_orders(), lease.head_address) == ([Order.LET_GO], "10.0.0.1:6379")
    os.close(reader)
    os.close(writer)


def test_the_lease_ends_with_stdin() -> None:
    reader, writer = os.pipe()
    lease = Lease(reader)
    os.write(writer, b"\n")
    assert lease.check(60.0, 0.0)
    os.close(writer)
    assert not lease.check(60.0, 0.0)
    assert lease.ended_by == "the supervisor closed the connection"
    os.close(reader)


def test_the_lease_ends_without_heartbeats_but_not_after_a_suspension() -> None:
    reader, writer = os.pipe()
    lease = Lease(reader)
    time.sleep(0.05)
    os.write(writer, b"\n")  # missed while this process slept
    assert lease.check(0.01, 0.0)
    time.sleep(0.05)
    assert not lease.check(0.01, 0.0)
    assert "no heartbeat" in lease.ended_by
    os.close(reader)
    os.close(writer)


def test_a_report_survives_the_way_and_other_output_is_passed_over() -> None:
    report = NodeReport("up", "n1", ip="10.0.0.1", num_gpus=4)
    assert report_from_line(report.to_line()) == report
    assert report_from_line(b"Currently Loaded Modules:") is None
    assert report_from_line(b"17") is None


def test_orders_are_taken_once_and_whole() -> None:
    reader, writer = os.pipe()
    lease = Lease(reader)
    os.write(writer, Order.STACKS.value + b"\nsta")
    assert lease.check(60.0, 0.0)
    assert [lease.take_orders(), lease.take_orders()] == [[Order.STACKS], []]
    os.write(writer, b"cks\n" + Order.LET_GO.value)
    assert lease.check(60.0, 0.0)
    assert lease.take_orders() == [Order.STACKS, Order.LET_GO]
    os.close(writer)
    os.close(reader)
