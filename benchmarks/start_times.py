"""How long a two-node Slurm job takes to its first trained step, and a killed driver to its next.

On a login node: `python benchmarks/start_times.py FOLDER [--rounds N] [sbatch options]`, where FOLDER is shared by the
nodes. A tiny run takes its first steps; then its driver is killed twice: alone, so that the next one goes on with its
engines, and together with the engines of the head, which are then made anew.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from common import median, print_table, two_node_benchmark

ATTEMPT_DIR_VARIABLE = "HPC_GRPO_ATTEMPT_DIR"
_DEADLINE_S = 300.0


def _measure(folder: Path, rounds: int) -> None:
    seconds: list[tuple[float, float, float]] = []
    for number in range(rounds):
        seconds.append(_run(folder / str(number)))
        shown = ", ".join(f"{each:.1f}" for each in seconds[-1])
        print(f"round {number}: {shown} s (load {os.getloadavg()[0]:.0f})", flush=True)
    rows = [[f"{median(list(each)):.1f}" for each in zip(*seconds, strict=True)]]
    columns = ["start to first step", "driver killed to next step", "driver and head's engines killed"]
    print_table(f"Seconds on two nodes, medians of {rounds}", columns, rows)


def _run(folder: Path) -> tuple[float, float, float]:
    from hpc_grpo.run.attempt import read_attempts
    from hpc_grpo.run.paths import RunDir
    from tests.integration.training_runs import tiny_config, write_workspace

    folder.mkdir()
    launch = {"object_store_gib": 0.1}
    every = {"train": {"total_steps": 2000}, "checkpoint": {"every": 2}, "launch": launch}
    config = tiny_config(write_workspace(folder), "run", **every)
    run = RunDir(folder / "runs" / "run")
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "hpc_grpo.cli", "train", str(config)]
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        _wait(lambda: len(_steps(run.metrics)) >= 4)
        (attempt,) = read_attempts(run)
        first_s = _steps(run.metrics)[0] - attempt.started_at
        return (
            first_s,
            _killed(run.path, run.metrics, "driver.main"),
            _killed(run.path, run.metrics, "driver.main", "ray::Engine"),
        )
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_DEADLINE_S)


def _killed(run: Path, metrics: Path, *names: str) -> float:
    """Kill the run's processes on this node whose command has one of the names; return seconds to a trained step."""
    for found in psutil.process_iter():
        with suppress(psutil.Error):
            is_own = found.environ().get(ATTEMPT_DIR_VARIABLE, "").startswith(str(run))
            if is_own and any(name in " ".join(found.cmdline()) for name in names):
                found.kill()
    killed_at, num_steps = time.time(), len(_steps(metrics))
    time.sleep(0.5)
    before = max(num_steps, len(_steps(metrics)))
    _wait(lambda: len(_steps(metrics)) >= before + 4)
    return _steps(metrics)[before] - killed_at


def _steps(metrics: Path) -> list[float]:
    """Return when each step ended, also those that were trained again, as Unix time."""
    return [json.loads(line)["time"] for line in metrics.read_text().splitlines()] if metrics.exists() else []


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {_DEADLINE_S:.0f} s")
        time.sleep(0.05)


if __name__ == "__main__":
    two_node_benchmark(__file__, _measure)()
