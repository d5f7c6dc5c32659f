"""Another user's program on the network of a run, without its token: calls each port that it is given.

`python stranger.py HOST:PORT ...` prints one JSON object: for each address what every kind of call was answered, and
what came of the attempts to join Ray and to hand it a job. It must not be able to do anything.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_TIMEOUT_S = 2.0
_PATHS = (
    ("GET", "/"),
    ("GET", "/metrics"),
    ("GET", "/api/version"),
    ("GET", "/api/jobs/"),
    ("GET", "/api/healthz"),
    ("GET", "/api/local_raylet_healthz"),
    ("GET", "/api/job_agent/jobs/x/logs"),
    ("POST", "/api/job_agent/jobs/"),
    ("POST", "/get_runtime_envs_info"),
    ("POST", "/get_or_create_runtime_env"),
)
_NOISE = bytes(range(256)) * 4


def listen_to(address: tuple[str, int], message: bytes) -> bytes:
    """What the port sends back, up to its close or the time limit."""
    received = b""
    with socket.create_connection(address, timeout=_TIMEOUT_S) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.sendall(message)
            while chunk := connection.recv(65536):
                received += chunk
        except (TimeoutError, ConnectionError):
            pass
    return received


def http_answers(address: tuple[str, int]) -> dict[str, str]:
    """Of the paths that are answered in HTTP: status and body."""
    answers = {}
    for method, path in _PATHS:
        message = f"{method} {path} HTTP/1.1\r\nHost: {address[0]}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        head, _, body = listen_to(address, message.encode()).decode(errors="replace").partition("\r\n\r\n")
        if head.startswith("HTTP/1."):
            answers[f"{method} {path}"] = f"{head.split()[1]} {body}"
        else:
            return answers
    return answers


def ray_methods() -> list[str]:
    """The full name of every gRPC method that Ray's own stubs know, and of gRPC's health check."""
    import ray.core.generated

    stubs = Path(ray.core.generated.__path__[0]).glob("*_pb2_grpc.py")
    found = {name for stub in stubs for name in re.findall(r"'(/ray\.rpc[\w.]*/\w+)'", stub.read_text())}
    # Ray ships no Python stub of this one.
    objects = [f"/ray.rpc.ObjectManagerService/{name}" for name in ("Push", "Pull")]
    return [*sorted(found), *objects, "/grpc.health.v1.Health/Check"]


def grpc_answers(address: tuple[str, int], methods: list[str]) -> dict[str, str]:
    """Method -> "OK" with the answer, or the status code; unknown methods are left out. {} where it is no gRPC."""
    import grpc

    channel = grpc.insecure_channel(f"{address[0]}:{address[1]}", options=[("grpc.enable_http_proxy", 0)])
    try:
        grpc.channel_ready_future(channel).result(timeout=_TIMEOUT_S)
    except grpc.FutureTimeoutError:
        return {}

    def call(method: str) -> str:
        try:
            return f"OK {channel.unary_unary(method)(b'', timeout=_TIMEOUT_S)!r}"
        except grpc.RpcError as error:
            return f"{error.code().name} {error.details()}"

    with ThreadPoolExecutor(16) as pool:
        answers = dict(zip(methods, pool.map(call, methods), strict=True))
    channel.close()
    return {method: answer for method, answer in answers.items() if not answer.startswith("UNIMPLEMENTED")}


def is_open_store(address: tuple[str, int]) -> bool:
    """Whether torch's rendezvous store is there: it answers a stranger's ping, and would take what he writes.

    torch's own client would wait for ever for a port that says nothing.
    """
    validate = b"\x00" + struct.pack("=I", 0x3C85F7CE)
    ping, nonce = b"\x0d", b"\x01\x02\x03\x04"
    return listen_to(address, validate + ping + nonce) == nonce


def call_port(address: tuple[str, int], methods: list[str]) -> dict[str, Any]:
    noise = listen_to(address, _NOISE).decode(errors="replace")
    http = http_answers(address)
    grpc = {} if http else grpc_answers(address, methods)
    open_store = not http and not grpc and is_open_store(address)
    return {"noise": noise, "http": http, "grpc": grpc, "open_store": open_store}


def outcome_of(program: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=180)
    return f"{done.returncode} {done.stdout[-2000:]}{done.stderr[-2000:]}"


_JOIN = "import sys, ray; ray.init(address=sys.argv[1]); print('JOINED', ray.nodes())"
_SUBMIT = (
    "import sys; from ray.job_submission import JobSubmissionClient\n"
    "print('SUBMITTED', JobSubmissionClient(sys.argv[1]).submit_job(entrypoint='id'))"
)


def main() -> None:
    """The first address is the one that Ray is joined at."""
    addresses = [(host, int(port)) for host, _, port in (word.rpartition(":") for word in sys.argv[1:])]
    methods = ray_methods()
    with ThreadPoolExecutor(32) as pool:
        join = pool.submit(outcome_of, _JOIN, sys.argv[1])
        ports = pool.map(lambda address: call_port(address, methods), addresses)
        answers = dict(zip(sys.argv[1:], ports, strict=True))
        http = [word for word, answer in answers.items() if answer["http"]]
        submits = pool.map(lambda word: outcome_of(_SUBMIT, f"http://{word}"), http)
        said = {"ports": answers, "join": join.result(), "submit": dict(zip(http, submits, strict=True))}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
