"""How long a two-node Slurm job takes until Ray is ready, beside a bare pair of `ray start` in the same job.

On a login node: `python benchmarks/ray_ready.py FOLDER [--rounds N] [sbatch options]`, where FOLDER is shared by the
nodes. The job brings Ray up by each way in turn. Bare: `ray start --head`, on the other node `ray start --address` as
soon as the head's port is open, and a Python that asks Ray until it sees both. Ours: `hpc-grpo train` with token,
leases, an environment of its own and bind-tested ports; its driver, of a tiny run, then takes its first step.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from common import median, print_table, two_node_benchmark

_BARE_PORT = 21379
_DEADLINE_S = 180.0
_ASK = """
import socket, sys, time, ray  # imported while the head starts
host, port = sys.argv[1].split(":")
while socket.socket().connect_ex((host, int(port))):
    time.sleep(0.05)
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
while sum(node["Alive"] for node in ray.nodes()) < 2:
    time.sleep(0.05)
"""


def _measure(folder: Path, rounds: int) -> None:
    hosts = subprocess.run(["scontrol", "show", "hostnames"], capture_output=True, text=True, check=True)
    bare, ours, first_step = [], [], []
    for number in range(rounds):
        bare.append(_bare(hosts.stdout.split(), folder / f"bare-{number}"))
        ready_s, step_s = _ours(folder, f"round{number}")
        ours.append(ready_s)
        first_step.append(step_s)
        print(f"round {number}: bare {bare[-1]:.1f} s, hpc-grpo {ours[-1]:.1f} s, first step after {step_s:.1f} s")
    ratios = [mine / theirs for mine, theirs in zip(ours, bare, strict=True)]
    rows = [
        ["bare ray start, both nodes seen", f"{median(bare):.1f}", "1"],
        ["hpc-grpo, Ray ready", f"{median(ours):.1f}", f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"],
        ["hpc-grpo, first step trained", f"{median(first_step):.1f}", ""],
    ]
    print_table(f"From the start, medians of {rounds}", ["", "seconds", "ratio to bare"], rows)


def _bare(hosts: list[str], temp_dir: Path) -> float:
    head, other = hosts
    address = f"{socket.gethostbyname(head)}:{_BARE_PORT}"
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    start = ["ray", "start", "--block", "--num-cpus=4", "--num-gpus=0", "--disable-usage-stats"]
    on_head = [*start, "--head", f"--port={_BARE_PORT}", "--include-dashboard=false"]
    begun = time.monotonic()
    processes = [_step(head, on_head, environment)]
    asker = subprocess.Popen([sys.executable, "-c", _ASK, address], env=environment)
    _wait_for_port(address)
    processes.append(_step(other, [*start, f"--address={address}"], environment))
    code = asker.wait(_DEADLINE_S)
    seconds = time.monotonic() - begun
    for process in reversed(processes):
        process.terminate()
        process.wait()
    if code != 0:
        raise SystemExit(f"bare Ray did not come up: {code}")
    return seconds


def _step(node: str, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    srun = ["srun", "--overlap", "--mem=0", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--export=ALL"]
    program = [str(Path(sys.executable).with_name(command[0])), *command[1:]]
    return subprocess.Popen([*srun, *program], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _wait_for_port(address: str) -> None:
    host, port = address.split(":")
    while socket.socket().connect_ex((host, int(port))):
        time.sleep(0.05)


def _ours(folder: Path, name: str) -> tuple[float, float]:
    from hpc_grpo.run.attempt import read_attempts
    from hpc_grpo.run.paths import RunDir
    from hpc_grpo.run.progress import read_metrics
    from tests.integration.training_runs import tiny_config, write_workspace

    workspace = folder / name
    workspace.mkdir()
    config = tiny_config(write_workspace(workspace), name, train={"total_steps": 2})
    subprocess.run([sys.executable, "-m", "hpc_grpo.cli", "train", str(config)], check=True, cwd=workspace)
    run = RunDir(workspace / "runs" / name)
    (attempt,) = read_attempts(run)
    first = min(read_metrics(run.metrics).items())[1]
    return attempt.phases_s["ray"], first["time"] - attempt.started_at


if __name__ == "__main__":
    two_node_benchmark(__file__, _measure)()
