from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from hpc_grpo.launch.agent import protocol
from hpc_grpo.launch.agent.protocol import (
    HEAD,
    Lease,
    NodeReport,
    NodeSpec,
    Order,
    Stage,
    hand_over,
    report_from_line,
    take_part,
)

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
    os.close(reader)


def test_the_lease_ends_without_heartbeats_but_not_after_a_suspension() -> None:
    reader, writer = os.pipe()
    lease = Lease(reader)
    time.sleep(0.05)
    os.write(writer, b"\n")  # missed while this process slept
    assert lease.check(0.01, 0.0)
    time.sleep(0.05)
    assert not lease.check(0.01, 0.0)
    os.write(writer, b"\n")  # too late
    assert not lease.check(60.0, 0.0)
    os.close(reader)
    os.close(writer)


def test_a_report_survives_the_way_and_other_output_is_passed_over() -> None:
    report = NodeReport("up", "n1", ip="10.0.0.1", num_gpus=4)
    assert report_from_line(report.to_line()) == report
    assert report_from_line(b"Currently Loaded Modules:") is None
    assert report_from_line(b"17") is None
    assert report_from_line(b'{"event": "module loaded"}') is None


def test_a_report_of_another_version_with_more_fields_is_read() -> None:
    line = NodeReport("failed", "n1", why="another version").to_line().replace(b"{", b'{"disk": "full", ', 1)
    assert report_from_line(line) == NodeReport("failed", "n1", why="another version")


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


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    (folder / "nodes" / "n2" / "ray").mkdir(parents=True)
    (folder / "stacks").mkdir()
    (folder / "nodes" / "n2" / "ray_start.log").write_bytes(b"started\n")
    (folder / "nodes" / "n2" / "ray" / "raylet.out").write_bytes(os.urandom(700_000))
    (folder / "stacks" / "n2-17-learner.txt").write_bytes(b"Thread 0x1\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def sent(logs: Path, kept: Path) -> bytes:
    """What arrives at the other end of the pipe."""
    reader, writer = os.pipe()
    received: list[bytes] = []

    def read() -> None:
        while data := os.read(reader, 65536):
            received.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(writer, "wb") as stdout:
        hand_over(logs, stdout, kept, is_urgent=False)
    thread.join()
    os.close(reader)
    return b"".join(received)


def test_logs_arrive_as_they_were_and_nothing_is_kept(logs: Path, tmp_path: Path) -> None:
    lines = sent(logs, tmp_path / "kept").splitlines()
    assert all(take_part(line, tmp_path / "attempt", "n2") for line in lines)
    assert contents(tmp_path / "attempt") == contents(logs)
    assert not (tmp_path / "kept").exists()


def test_of_a_long_log_the_end_arrives(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_MAX_FILE_BYTES", 400_000)
    for line in sent(logs, tmp_path / "kept").splitlines():
        take_part(line, tmp_path / "attempt", "n2")
    name = "nodes/n2/ray/raylet.out"
    assert contents(tmp_path / "attempt")[name] == contents(logs)[name][-400_000:]


def test_logs_of_a_ray_before_in_the_same_attempt_are_not_lost(logs: Path, tmp_path: Path) -> None:
    for text in (b"first\n", b"second\n"):
        (logs / "nodes" / "n2" / "ray_start.log").write_bytes(text)
        for line in sent(logs, tmp_path / "kept").splitlines():
            take_part(line, tmp_path / "attempt", "n2")
    folder = tmp_path / "attempt" / "nodes" / "n2"
    texts = [(folder / name).read_text() for name in ("ray_start.log.before", "ray_start.log")]
    assert texts == ["first\n", "second\n"]


def test_a_head_that_does_not_read_leaves_the_logs_on_the_node(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_URGENT_S", 0.1)
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as stdout:
        hand_over(logs, stdout, tmp_path / "kept", is_urgent=True)
    os.close(reader)
    assert contents(tmp_path / "kept") == contents(logs)


def test_a_head_that_is_gone_leaves_the_logs_on_the_node(logs: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        hand_over(logs, stdout, tmp_path / "kept", is_urgent=False)
    assert contents(tmp_path / "kept") == contents(logs)


@pytest.mark.parametrize("name", ["../../config.yaml", "/etc/passwd", "attempt.json", "nodes/n1/ray_start.log"])
def test_a_node_writes_no_file_but_its_own_logs(tmp_path: Path, name: str) -> None:
    line = f'{{"log": "{name}", "offset": 0, "data": ""}}'.encode()
    assert take_part(line, tmp_path / "attempt", "n2")
    assert not list(tmp_path.rglob("*"))


def test_a_report_is_no_part_of_a_log(tmp_path: Path) -> None:
    assert not take_part(b'{"event": "up"}', tmp_path, "n2")


@pytest.mark.parametrize(
    "line",
    [
        b'{"log": "nodes/n2/a.log", "offset": 0, "da{"event": "gone", "node": "n2"}',
        b'{"log": "nodes/n2/a.log", "offset": 0}',
        b'{"log": "nodes/n2/a.log", "offset": 0, "data": "eJw"}',
        b'{"log": "nodes/n2/a.log", "offset": 0, "data": "YQ=="}',
    ],
)
def test_a_line_that_was_cut_short_ends_nothing(tmp_path: Path, line: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    assert take_part(line, tmp_path / "attempt", "n2")
    assert "A part of a log of node n2 is lost" in capfd.readouterr().err


def test_a_log_for_which_the_head_has_no_place_ends_nothing(logs: Path, tmp_path: Path) -> None:
    (tmp_path / "attempt").touch()
    assert all(take_part(line, tmp_path / "attempt", "n2") for line in sent(logs, tmp_path / "kept").splitlines())


def test_stacks_arrive_first(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_MAX_BYTES", 100)
    for line in sent(logs, tmp_path / "kept").splitlines():
        take_part(line, tmp_path / "attempt", "n2")
    assert contents(tmp_path / "attempt")["stacks/n2-17-learner.txt"] == b"Thread 0x1\n"
