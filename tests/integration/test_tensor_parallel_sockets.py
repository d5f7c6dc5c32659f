"""An engine over several processes opens nothing to other nodes: docs/security.md counts its sockets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_an_engine_over_two_processes_listens_on_loopback_alone_as_often_as_documented(tmp_path: Path) -> None:
    with TemporaryDirectory(dir="/tmp") as temp_dir:  # pytest's paths are too long for sockets
        command = [sys.executable, "-m", "tests.integration.tensor_parallel_sockets", str(tmp_path / "model")]
        env = {**os.environ, "TMPDIR": temp_dir}
        done = subprocess.run(
            command, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"tcp"')))
        print(
            {title: f"{len(ips)} x {sorted(set(ips))}" for title, ips in said["tcp"].items()},
            said["unix"],
            said["modes"],
        )
        assert {ip for ips in said["tcp"].values() for ip in ips} == {"127.0.0.1"}
        counts = [len(ips) for title, ips in said["tcp"].items() if title.startswith("VLLM::Worker")]
        documented = re.search(
            r"each of an engine's workers has (\d+) listeners", (REPOSITORY / "docs/security.md").read_text()
        )
        assert documented is not None
        assert counts == [int(documented[1])] * 2
        assert sum(len(ips) for ips in said["tcp"].values()) == sum(counts), "no other process of it listens"
        assert said["unix"] == [temp_dir], "in the folder of mode 0700 that a run gives it"
        assert said["modes"] == ["600"]
