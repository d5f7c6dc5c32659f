"""`hpc-grpo train` on this machine: real Ray, a stand-in for training."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

DRIVER = Path(__file__).resolve().parents[1] / "stand_ins" / "driver.py"
_DEADLINE_S = 180.0


def command(root: Path) -> list[str]:
    words = ["train", "local/debug", f"run.root={root}", "--driver", str(DRIVER)]
    return [sys.executable, "-m", "hpc_grpo.cli", *words]


def environment(**changes: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return {**clean, "CUDA_VISIBLE_DEVICES": "", **changes}


def record(root: Path) -> dict[str, Any]:
    (path,) = (root / "debug" / "attempts").glob("*/attempt.json")
    return dict(json.loads(path.read_text()))


def left_behind(root: Path) -> list[str]:
    """Folders of the attempt, and processes that name them."""
    name = f"hg-{record(root)['job_id']}-"
    folders = [str(path) for parent in ("/tmp", "/dev/shm") for path in Path(parent).glob(f"{name}*")]
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if name in process.read_text(errors="replace"):
                folders.append(str(process))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return folders


def wait_until(condition: Any, what: str, deadline_s: float = _DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"after {deadline_s:.0f} s still not true: {what}"
        time.sleep(0.2)


def test_a_run_completes_and_leaves_nothing(tmp_path: Path) -> None:
    env = environment(RAY_ADDRESS="10.9.9.9:1", WORLD_SIZE="8")
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, env=env, timeout=_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stand-in: 1 nodes, 0 GPUs" in done.stdout
    ended = record(tmp_path)
    assert ended["exit_kind"] == "complete"
    assert set(ended["phases_s"]) == {"head", "ray", "driver", "teardown"}
    seen = json.loads((tmp_path / "debug" / "stand_in.json").read_text())
    assert seen["witnesses"][0]["ip"] == "127.0.0.2"
    assert "WORLD_SIZE" not in seen["witnesses"][0]["env"]
    attempt_dir = Path(seen["contract"]["HPC_GRPO_ATTEMPT_DIR"])
    assert "stand-in: 1 nodes" in (attempt_dir / "driver.log").read_text()
    assert left_behind(tmp_path) == []


def test_ctrl_c_on_a_terminal_reaches_the_driver_once_and_everything_ends(tmp_path: Path) -> None:
    terminal, slave = pty.openpty()
    env = environment(HPC_GRPO_STAND_IN_SLEEP_S="100")
    run = subprocess.Popen(command(tmp_path), stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
    os.close(slave)
    wait_until((tmp_path / "debug" / "stand_in.json").exists, "the driver runs")
    os.killpg(run.pid, signal.SIGINT)  # what a terminal does on Ctrl+C
    assert run.wait(timeout=60) == 75
    assert record(tmp_path)["exit_kind"] == "resumable"
    printed = os.read(terminal, 65536).decode()
    assert printed.count("driver got SIGINT") == 1
    assert left_behind(tmp_path) == []


def test_a_killed_supervisor_takes_everything_with_it(tmp_path: Path) -> None:
    env = environment(HPC_GRPO_STAND_IN_SLEEP_S="100")
    run = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    wait_until((tmp_path / "debug" / "stand_in.json").exists, "the driver runs")
    assert left_behind(tmp_path)
    run.kill()
    run.wait()
    wait_until(lambda: not left_behind(tmp_path), "nothing is left", 30.0)


def test_a_stuck_driver_leaves_the_stacks_of_every_process_and_is_ended(tmp_path: Path) -> None:
    env = environment(HPC_GRPO_STAND_IN_STUCK="1")
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, env=env, timeout=_DEADLINE_S, check=False)
    assert done.returncode == 128 + signal.SIGKILL
    ended = record(tmp_path)
    assert ended["exit_kind"] == "crash"
    assert re.match(r"The driver \(process \d+\) made no progress in 'train' for \d+ s", ended["why"])
    assert "The stacks of its processes are in " in ended["why"]
    (attempt_dir,) = (tmp_path / "debug" / "attempts").iterdir()
    stacks = {path.stem.rpartition("-")[2]: path.read_text() for path in (attempt_dir / "stacks").iterdir()}
    assert sorted(stacks) == ["driver", "witness"]
    assert "driver.py" in stacks["driver"]
    assert "main_loop" in stacks["witness"]
    assert left_behind(tmp_path) == []


def test_driver_and_workers_import_the_runs_own_copy_and_not_the_checkout_they_are_started_in(tmp_path: Path) -> None:
    checkout = DRIVER.parents[2]
    words = ["train", "local/debug", f"run.root={tmp_path}", "--driver", str(DRIVER.with_name("where.py"))]
    command = [sys.executable, "-m", "hpc_grpo.cli", *words]
    done = subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, env=environment(), timeout=_DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    copy = str(tmp_path / "debug" / "source" / "hpc_grpo" / "__init__.py")
    found = json.loads((tmp_path / "debug" / "where.json").read_text())
    assert found == {"driver": copy, "worker": copy, "cwd": str(checkout)}
