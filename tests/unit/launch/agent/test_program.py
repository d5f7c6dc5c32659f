"""Programs in a container, with an engine that behaves as docker does: its containers are not the client's children."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_grpo.launch.agent.program import Inside, Program
from hpc_grpo.launch.place.container import Container
from hpc_grpo.system.processes import start_time
from tests.support.processes import gone, wait_until

ENGINE = """#!/bin/bash
case $1 in
run)
    while [ "$1" != image ]; do shift; done; shift
    setsid "$@" </dev/null & echo $! >> {made}
    trap 'kill -TERM $!' TERM
    wait $!; code=$?
    while kill -0 $! 2>/dev/null; do wait $!; code=$?; done
    exit $code ;;
ps) cat {made} ;;
rm) shift 2; for pid; do kill -9 -- -$pid 2>/dev/null; done; true ;;
esac
"""


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    engine, made = tmp_path / "bin" / "docker", tmp_path / "made"
    engine.parent.mkdir()
    engine.write_text(ENGINE.format(made=made))
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{engine.parent}:{os.environ['PATH']}")
    yield Inside(Container("image", "docker", sys.executable), "tag", "ray", tmp_path)
    for pid in map(int, made.read_text().split()):
        wait_until(lambda pid=pid: gone(pid), "no container is left")


def start(inside: Inside | None, program: str) -> Program:
    started = Program([sys.executable, "-c", program], dict(os.environ), inside)
    if inside:
        wait_until(lambda: started.pid != started.process.pid, "it runs in its container")
    return started


def test_its_id_is_that_of_the_program_and_it_ends_with_its_code(inside: Inside) -> None:
    program = start(inside, "import signal, sys; signal.signal(10, lambda *_: sys.exit(75)); signal.pause()")
    wait_until(lambda: "-c" in Path(f"/proc/{program.pid}/cmdline").read_text(), "it has begun")
    wait_until(lambda: b"0000000000000200" in Path(f"/proc/{program.pid}/status").read_bytes(), "it handles the signal")
    program.send(signal.SIGUSR1)
    wait_until(lambda: program.poll() is not None, "it has ended")
    assert program.poll() == 75
    program.end(1.0)


def test_a_kill_reaches_the_program_itself_and_is_told_as_such(inside: Inside) -> None:
    program = start(inside, "import time; time.sleep(100)")
    program.send(signal.SIGKILL)
    wait_until(lambda: program.poll() is not None, "it has ended")
    assert program.poll() == -signal.SIGKILL
    program.end(1.0)


def test_a_program_that_outlives_its_client_is_ended(inside: Inside) -> None:
    program = start(inside, "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(100)")
    pid = program.pid
    program.process.kill()
    wait_until(lambda: program.poll() is not None, "the client is gone")
    assert start_time(pid)
    program.end(0.1)
    assert gone(pid)


def test_without_a_container_it_is_the_process_itself() -> None:
    program = start(None, "import time; time.sleep(100)")
    assert program.pid == program.process.pid
    program.end(5.0)
    assert program.poll() == -signal.SIGTERM
