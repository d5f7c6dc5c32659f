"""The gate lets in who proves the token, under a name of its own, and nobody else."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from hpc_grpo.errors import NodesUnavailableError
from hpc_grpo.launch.place.joined import gate as gate_module
from hpc_grpo.launch.place.joined.connection import MAGIC, Hello, NotProvedError, prove_to_head
from hpc_grpo.launch.place.joined.gate import Gate
from hpc_grpo.system.proof import (
    MOST_OF_ADDRESS,
    MOST_UNPROVED,
    NONCE_BYTES,
    PROOF_BYTES,
    REFUSAL,
    answer,
    proof,
    read_exactly,
)

TOKEN = b"a token of the run, long enough"


@pytest.fixture
def gate() -> Iterator[Gate]:
    opened = Gate(0, lambda: TOKEN, "1.0", "head")
    yield opened
    opened.close()


def dial(gate: Gate, address: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", gate.port), timeout=60.0, source_address=(address, 0))


def join(gate: Gate, name: str, identity: str = "", version: str = "1.0") -> socket.socket:
    connection = dial(gate)
    prove_to_head(connection, TOKEN)
    connection.sendall(Hello(name, identity or name, version).to_line())
    return connection


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_workers_wait_in_the_order_of_their_names_and_are_taken_once(gate: Gate) -> None:
    second, first = join(gate, "pod3"), join(gate, "pod2")
    wait_for(lambda: len(gate.waiting()) == 2)
    assert [*gate.waiting()] == ["pod2", "pod3"]
    taken = gate.take("pod2")
    assert taken is not None
    taken.sendall(b"spec\n")
    assert read_exactly(first, 5) == b"spec\n"
    assert gate.take("pod2") is None
    assert [*gate.waiting()] == ["pod3"]
    second.close()
    wait_for(lambda: not gate.waiting())


def test_a_wrong_token_is_hung_up_on(gate: Gate, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotProvedError, match="another token"):
        prove_to_head(dial(gate), b"another token, just as long")
    assert not gate.waiting()
    wait_for(lambda: "does not know the token" in capsys.readouterr().out)


def test_a_handshake_that_was_recorded_proves_nothing(gate: Gate) -> None:
    recorded = dial(gate)
    challenge = read_exactly(recorded, len(MAGIC) + NONCE_BYTES)
    said, expected = answer(TOKEN, MAGIC, challenge[len(MAGIC) :])
    recorded.sendall(said)
    assert read_exactly(recorded, 32) == expected
    replayed = dial(gate)
    read_exactly(replayed, len(MAGIC) + NONCE_BYTES)
    replayed.sendall(said)
    assert read_exactly(replayed, 32) == REFUSAL
    assert replayed.recv(1) == b""


def test_a_heads_proof_does_not_serve_as_a_workers() -> None:
    assert proof(TOKEN, MAGIC, b"listener", b"n" * 32, b"m" * 32) != proof(
        TOKEN, MAGIC, b"caller", b"n" * 32, b"m" * 32
    )


def test_who_says_nothing_is_hung_up_on(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "HANDSHAKE_S", 0.2)
    silent = dial(gate)
    read_exactly(silent, len(MAGIC) + NONCE_BYTES)
    assert silent.recv(1) == b""


def test_who_sends_a_byte_now_and_then_is_hung_up_on(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "HANDSHAKE_S", 0.5)
    slow = dial(gate)
    read_exactly(slow, len(MAGIC) + NONCE_BYTES)
    with pytest.raises(ConnectionError):
        for _ in range(NONCE_BYTES + PROOF_BYTES - 1):
            slow.sendall(b"x")
            time.sleep(0.1)


def is_open(connection: socket.socket) -> bool:
    """Tell whether the gate has not hung up after its challenge."""
    connection.settimeout(0.2)
    try:
        read_exactly(connection, len(MAGIC) + NONCE_BYTES)
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except (EOFError, ConnectionError):
        return False


def test_strangers_at_other_addresses_leave_a_worker_its_place(gate: Gate) -> None:
    """Two strangers open connections while a worker's proof is on its way, as over a slow network."""
    worker = dial(gate)
    challenge = read_exactly(worker, len(MAGIC) + NONCE_BYTES)
    strangers = [dial(gate, address) for _ in range(200) for address in ("127.0.0.2", "127.0.0.3")]
    wait_for(lambda: len(gate.unproved) == 2 * MOST_OF_ADDRESS + 1)
    said, expected = answer(TOKEN, MAGIC, challenge[len(MAGIC) :])
    worker.sendall(said)
    assert read_exactly(worker, 32) == expected
    worker.sendall(Hello("pod2", "pod2", "1.0").to_line())
    wait_for(lambda: "pod2" in gate.waiting())
    for stranger in strangers:
        stranger.close()


def test_strangers_at_a_workers_own_address_do_not_keep_it_out(gate: Gate) -> None:
    """The gate hangs up on any caller of the address, so a worker that dials again gets in."""
    strangers: list[socket.socket] = []
    for _ in range(100):
        worker = dial(gate)
        challenge = read_exactly(worker, len(MAGIC) + NONCE_BYTES)
        strangers += [dial(gate) for _ in range(MOST_OF_ADDRESS)]
        said, expected = answer(TOKEN, MAGIC, challenge[len(MAGIC) :])
        try:
            worker.sendall(said)
            if read_exactly(worker, 32) == expected:
                break
        except (EOFError, ConnectionError):
            worker.close()
    else:
        pytest.fail("a worker that dialed 100 times was never let in")
    for stranger in strangers:
        stranger.close()


def test_strangers_of_many_addresses_share_the_places_of_the_gate(gate: Gate) -> None:
    worker = dial(gate)
    strangers = [dial(gate, f"127.0.1.{index}") for _ in range(30) for index in range(1, 21)]
    wait_for(lambda: len(gate.unproved) == MOST_UNPROVED)
    assert is_open(worker)
    held = join(gate, "pod2")
    wait_for(lambda: "pod2" in gate.waiting())
    held.close()
    for stranger in strangers:
        stranger.close()


def test_a_gate_without_a_place_for_a_worker_is_no_refusal(gate: Gate) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    worker = socket.create_connection(silent.getsockname())
    head, _ = silent.accept()
    head.sendall(MAGIC + bytes(NONCE_BYTES))
    head.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        prove_to_head(worker, TOKEN)


@pytest.mark.parametrize(
    "hello",
    [
        b'{"name": 1, "identity": "a", "version": "1.0"}',
        b'{"name": "a", "identity": [], "version": "1.0"}',
        b'{"name": "a", "identity": "a", "version": {}}',
        b'{"name": "a", "identity": "a", "version": "1.0", "interface": 3}',
        b'{"name": "a"}', b"[1]", b"3", b"null", b"[" * 4000,
    ],
)  # fmt: skip
def test_a_hello_of_wrong_types_is_hung_up_on_and_the_gate_lives(gate: Gate, hello: bytes) -> None:
    odd = dial(gate)
    prove_to_head(odd, TOKEN)
    odd.settimeout(60.0)
    odd.sendall(hello + b"\n")
    assert odd.recv(1) == b""
    held = join(gate, "pod2")
    wait_for(lambda: "pod2" in gate.waiting())
    held.close()


def test_a_second_worker_of_one_name_gets_another_and_one_that_dials_again_keeps_its_own(gate: Gate) -> None:
    connections = [join(gate, "head"), join(gate, "pod", "one"), join(gate, "pod", "two")]
    wait_for(lambda: len(gate.waiting()) == 3)
    assert set(gate.waiting()) == {"head-2", "pod", "pod-2"}
    connections.append(
        join(gate, "pod", next(hello.identity for name, hello in gate.waiting().items() if name == "pod"))
    )
    wait_for(lambda: sum(name.startswith("pod") for name in gate.waiting()) == 2)
    assert set(gate.waiting()) == {"head-2", "pod", "pod-2"}


@pytest.mark.parametrize(("name", "version", "why"), [("../up", "1.0", "cannot be a node's"), ("p", "2.0", "2.0")])
def test_a_worker_that_does_not_fit_is_told_why(gate: Gate, name: str, version: str, why: str) -> None:
    told = join(gate, name, version=version).makefile("rb").read()
    assert why.encode() in told
    assert b'"code": 78' in told


def test_a_farewell_reaches_those_that_wait_and_those_that_dial_after_it(gate: Gate) -> None:
    waiting = join(gate, "pod2")
    wait_for(lambda: "pod2" in gate.waiting())
    gate.say_farewell(b"over\n", ["pod2"], 5.0)
    assert waiting.makefile("rb").read() == b"over\n"
    assert join(gate, "pod3").makefile("rb").read() == b"over\n"


def test_a_port_that_is_taken_is_named(gate: Gate) -> None:
    with pytest.raises(NodesUnavailableError, match=f"launch.port = {gate.port}"):
        Gate(gate.port, TOKEN, "1.0", "head")
