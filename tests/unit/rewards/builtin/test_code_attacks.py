"""Attacks on the sandbox of `code`. An attack asserts that it broke out, so that a score of 1.0 is a breach."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_grpo.config import RewardConfig
from hpc_grpo.grading.pool import RewardPool
from hpc_grpo.rewards.sandbox.isolation import Limits, run_job
from tests.support.isolation import ISOLATION, needs_isolation

SECRET = "planted-8c1e"
MANY = """
import os, time
count = 0
for _ in range(60):
    try:
        if os.fork() == 0:
            time.sleep(1)
            os._exit(0)
        count += 1
    except OSError:
        break
print(count)
"""
ATTACKS = {
    "fork bomb": """
import os, time
end = time.monotonic() + 20
while time.monotonic() < end:
    try: os.fork()
    except OSError: pass
broke_out = True""",
    "memory bomb": "broke_out = len(bytearray(2 << 30)) > 0",
    "memory bomb of many": """
import os, time
for _ in range(20):
    if os.fork() == 0:
        held = b'1' * (100 << 20)
        time.sleep(20)
time.sleep(20)
broke_out = True""",
    "infinite loop": "while True: pass",
    "sleep": "import time; time.sleep(60); broke_out = True",
    "writing outside": """
broke_out = False
for path in ('OUTSIDE/written', '/usr/written', '/etc/written', '/written', '/proc/sys/kernel/hostname'):
    try: open(path, 'w').write('x'); broke_out = True
    except OSError: pass""",
    "a planted secret": """
import os, pathlib
broke_out = False
for path in ['OUTSIDE/secret', '/etc/shadow', *map(str, pathlib.Path('/proc').glob('*/environ'))]:
    try: broke_out |= 'planted-' in open(path, errors='replace').read() or 'shadow' in path
    except OSError: pass
broke_out |= any('planted-' in value for value in os.environ.values())""",
    "a socket": "import socket; socket.create_connection(('127.0.0.1', PORT), timeout=2); broke_out = True",
    "killing the parent": """
import os, signal
broke_out = False
for pid in (PARENT, 1, os.getppid()):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try: os.kill(pid, number); broke_out |= pid == PARENT
        except OSError: pass
try: os.kill(-1, signal.SIGKILL)
except OSError: pass""",
    "filling the disk": """
written = 0
for number in range(1000):
    with open(f'/tmp/{number}', 'wb') as file: written += file.write(b'x' * (1 << 20))
broke_out = True""",
    "endless output": "while True: print('x' * 1000)",
    "a new namespace": "import os, subprocess; broke_out = subprocess.run(['unshare', '-Ur', 'true']).returncode == 0",
    "leaving without the tests": "import os; os._exit(0)",
    "swallowing the tests": "import sys; sys.exit = lambda *_: None; broke_out = None",
}


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@needs_isolation
def test_attacks_are_contained_and_scored_and_the_pool_is_healthy_after(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    [counted] = run_job(ISOLATION, [sys.executable, "-I", "-c", MANY], {}, [""], Limits(processes=20))
    assert int(counted.stdout.split()[-1]) < 20, "the kernel does not limit processes: no bomb is set off"
    (tmp_path / "secret").write_text(SECRET)
    monkeypatch.setenv("API_KEY", SECRET)
    values = {"OUTSIDE": str(tmp_path), "PORT": str(port), "PARENT": str(os.getpid())}
    programs = dict(ATTACKS)
    for name, value in values.items():
        programs = {attack: program.replace(name, value) for attack, program in programs.items()}
    args = {"time_s": 1.0, "memory_mib": 512, "parallel": 3}
    pool = RewardPool([RewardConfig(name="code", timeout_s=300.0, args=args)], num_workers=1)
    try:
        fields = {"tests": "assert broke_out"}
        outcome = pool.submit("q", list(programs.values()), fields).result()
        healthy = pool.submit("q", ["broke_out = True", "broke_out = False"], fields).result()
    finally:
        pool.close()
    assert outcome.errors == ()
    assert {name: score for name, score in zip(programs, outcome.rewards, strict=True) if score} == {}
    assert healthy.rewards == (1.0, 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert not Path("/usr/written").exists()
