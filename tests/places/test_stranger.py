"""A pod that is not the run's, on the same network: without the token, with a wrong one, with a recorded handshake."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.launch.place.joined.connection import MAGIC
from hpc_grpo.system.proof import REFUSAL
from tests.places.conftest import residue_of
from tests.places.scene import Command, Scene
from tools.virtual_machines.beds import Bed

pytestmark = [pytest.mark.places, pytest.mark.long]

HEAD, WORKER, STRANGER = "pod1", "pod2", "pod3"
GATE_PORT, RELAY_PORT = 6379, 6390
TWO_NODES = {"EXPECTED_WORKERS": "1", "HPC_GRPO_STAND_IN_STEP_S": "0.5"}
PROGRAM = Path(__file__).resolve().parents[1] / "slurm" / "stranger.py"
PUBLIC_PATHS = {"GET /api/healthz", "GET /api/local_raylet_healthz"}
PUBLIC_METHOD = "/grpc.health.v1.Health/Check"
_DEADLINE_S = 300.0

RELAY = """
import socket, sys, threading
head, port, record = sys.argv[1], int(sys.argv[2]), sys.argv[3]
listener = socket.create_server(("", int(sys.argv[4])))
def pump(source, target, path):
    with open(path, "wb", buffering=0) as file:
        while data := source.recv(65536):
            file.write(data); target.sendall(data)
    target.shutdown(socket.SHUT_WR)
print("relays", flush=True)
while True:
    worker = listener.accept()[0]
    try:
        there = socket.create_connection((head, port))
    except OSError:
        worker.close(); continue
    threading.Thread(target=pump, args=(worker, there, record), daemon=True).start()
    threading.Thread(target=pump, args=(there, worker, record + ".head"), daemon=True).start()
"""
"""Keeps what a worker says to the head and what the head says to it, each connection in place of the one before."""

REPLAY = """
import socket, sys
said = bytes.fromhex(sys.argv[3])
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
greeting = connection.recv(4096)
answer = b""
try:
    connection.sendall(said)
    while data := connection.recv(4096):
        answer += data
except ConnectionError:
    pass
print(greeting.hex(), answer.hex(), sep=",")
"""


@dataclass
class Attacked:
    """A run on two pods while a third calls it, and after it was stopped."""

    scene: Scene
    head: Command
    replayed: list[tuple[bytes, bytes]] = field(default_factory=list)
    wrong_token: Command | None = None
    said: dict[str, Any] = field(default_factory=dict)
    steps_meanwhile: int = 0


@pytest.fixture(scope="module")
def attacked(pods: Bed) -> Iterator[Attacked]:
    with Scene(pods, "guarded", train={"total_steps": 2000}, launch={"ray_dashboard": True}) as scene:
        record = pods.storage(STRANGER) / "recorded"
        relay = pods.popen(
            STRANGER,
            [sys.executable, "-c", RELAY, "pod1.runpod.internal", str(GATE_PORT), str(record), str(RELAY_PORT)],
            stdout=-1,
        )
        assert relay.stdout is not None
        assert relay.stdout.readline() == "relays\n"
        try:
            # The worker dials the relay: it has the token, so the head and it are none the wiser.
            through_relay = {"HEAD_POD_ID": STRANGER, **TWO_NODES}
            words = ("place", "pod", str(scene.config))
            worker = scene.start_stepping(WORKER, *words, f"launch.port={RELAY_PORT}", **through_relay)
            attacked = Attacked(scene, scene.start_stepping(HEAD, *words, **TWO_NODES))
            scene.wait_for_step(2)
            before = scene.step
            _attack(pods, attacked, record)
            scene.wait_for_step(before + 2)
            attacked.steps_meanwhile = scene.step - before
            attacked.head.ctrl_c()
            attacked.head.wait()
            worker.ctrl_c()
            worker.wait()
        finally:
            relay.kill()
            relay.communicate()
        yield attacked
    assert residue_of(pods) == {}


def _attack(pods: Bed, attacked: Attacked, record: Path) -> None:
    scene = attacked.scene
    recorded = record.read_bytes()
    hello_ends = recorded.index(b"\n", 64) + 1
    for said in (recorded[:hello_ends], b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096)):
        address = ("pod1.runpod.internal", str(GATE_PORT))
        done = pods.run(STRANGER, [sys.executable, "-c", REPLAY, *address, said.hex()], deadline_s=60)
        assert done.returncode == 0, done.stderr
        greeting, answer = (bytes.fromhex(word) for word in done.stdout.strip().split(","))
        attacked.replayed.append((greeting, answer))
    wrong = {**TWO_NODES, "HPC_GRPO_TOKEN": "f" * 64}
    attacked.wrong_token = scene.start_stepping(STRANGER, "place", "pod", str(scene.config), **wrong)
    attacked.wrong_token.wait()
    (attempt,) = scene.attempts
    addresses = {attempt.ray_address: None} | dict.fromkeys(
        address for name in (HEAD, WORKER) for address in _open_ports(pods, name)
    )
    command = [sys.executable, str(PROGRAM), *addresses]
    done = pods.run(STRANGER, command, deadline_s=_DEADLINE_S)
    assert done.returncode == 0, done.stderr
    attacked.said = json.loads(done.stdout)


def _open_ports(pods: Bed, name: str) -> list[str]:
    """The addresses on a pod that others can reach."""
    lines = pods.run(name, ["ss", "-Hltn"]).stdout.splitlines()
    listening = [line.split()[3].rpartition(":") for line in lines]
    reached = [(host.strip("[]"), port) for host, _, port in listening if not host.startswith(("127.", "[::1]"))]
    return [f"{pods.address(name)}:{port}" for _, port in reached]


def test_a_recorded_handshake_and_noise_are_hung_up_on(attacked: Attacked) -> None:
    assert len(attacked.replayed) == 4
    for greeting, answer in attacked.replayed:
        assert greeting.startswith(MAGIC)
        assert answer in (b"", REFUSAL)
    assert len({greeting for greeting, _ in attacked.replayed}) == 4


def test_a_worker_with_a_wrong_token_is_not_let_in_and_told_why(attacked: Attacked) -> None:
    assert attacked.wrong_token is not None
    assert attacked.wrong_token.process.returncode == 78
    assert "HPC_GRPO_TOKEN" in attacked.wrong_token.text
    assert "does not know the token" in attacked.head.text


def test_open_ports_answer_nothing_but_that_they_are_there(attacked: Attacked) -> None:
    ports = attacked.said["ports"]
    assert f"198.18.0.11:{GATE_PORT}" in ports
    for address, answers in ports.items():
        for method, answer in answers["grpc"].items():
            assert answer.startswith("UNAUTHENTICATED") or method == PUBLIC_METHOD, (address, method, answer)
        for path, answer in answers["http"].items():
            assert answer.startswith("401 ") or path in PUBLIC_PATHS, (address, path, answer)
        assert not answers["open_store"], address
    assert "JOINED" not in attacked.said["join"]
    assert not any("SUBMITTED" in said for said in attacked.said["submit"].values())


def test_the_run_goes_on_as_if_nobody_had_called(attacked: Attacked) -> None:
    assert attacked.steps_meanwhile >= 2
    (attempt,) = attacked.scene.attempts
    assert (attempt.nodes, attempt.restarts, attempt.lost_nodes) == ([HEAD, WORKER], [], {})
    token = attacked.scene.run.join_token.read_text().strip()
    assert token not in json.dumps(attacked.said)
    assert token not in attacked.head.text
