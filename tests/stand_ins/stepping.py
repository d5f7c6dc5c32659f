"""A driver for tests of places: real Ray, checkpoints, a ledger and progress as training writes them; no training.

A step is a call of an actor on every node, so it fails where one is lost. HPC_GRPO_STAND_IN_STEP_S is how long a step
takes; every second one ends with a checkpoint.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import ray

from hpc_grpo.driver.schedule import StopRequest, wait_for_ray
from hpc_grpo.run.checkpoint import Manifest, find_checkpoint, hash_files, write_manifest
from hpc_grpo.run.contract import ATTEMPT_VARIABLE, NUM_NODES_VARIABLE
from hpc_grpo.run.files import publish_dir, start_staging, write_atomic
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.run.ledger import Ledger
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import RunState, write_state
from hpc_grpo.run.stacks import dump_stacks_on_signal

_ORDINALS_PER_STEP = 4
_JOIN_DEADLINE_S = 60.0


@ray.remote(num_cpus=0.1)
class Hand:
    def work(self, seconds: float) -> str:
        time.sleep(seconds)
        return os.uname().nodename


def hands() -> list[ray.actor.ActorHandle]:
    """One on each node of the attempt. Raises RuntimeError where fewer are in Ray."""
    expected, end = int(os.environ[NUM_NODES_VARIABLE]), time.monotonic() + _JOIN_DEADLINE_S
    while len(nodes := [node for node in ray.nodes() if node["Alive"]]) < expected:
        if time.monotonic() > end:
            raise RuntimeError(f"{len(nodes)} of {expected} nodes are in Ray")
        time.sleep(0.2)
    print(f"stepping: {len(nodes)} nodes, {ray.cluster_resources().get('GPU', 0):.0f} GPUs", flush=True)
    return [Hand.options(resources={f"node:{node['NodeManagerAddress']}": 0.01}).remote() for node in nodes]


def save(run: RunDir, step: int, world_size: int) -> None:
    folder = start_staging(run.checkpoint(step))
    (folder / "state").write_text(f"{step}\n")
    files = tuple(hash_files(folder, ["state"]))
    write_manifest(folder, Manifest(step, world_size, 1, files, {"step": step}))
    publish_dir(run.checkpoint(step))


def main(run: RunDir) -> int:
    total, attempt = read_config(run).train.total_steps, int(os.environ[ATTEMPT_VARIABLE])
    assert total is not None
    stop = StopRequest(run)
    if (address := wait_for_ray(lambda: stop.reason(0.0) is not None)) is None:
        return 75
    ray.init(address=address, log_to_driver=False)
    stop.listen()
    workers = hands()
    checkpoint, _ = find_checkpoint(run)
    step = checkpoint.step if checkpoint else 0
    ledger, step_s = Ledger(run, attempt), float(os.environ.get("HPC_GRPO_STAND_IN_STEP_S", "0.2"))
    while step < total and stop.reason(0.0) is None:
        ray.get([worker.work.remote(step_s) for worker in workers])
        ledger.append(step + 1, range(step * _ORDINALS_PER_STEP, (step + 1) * _ORDINALS_PER_STEP))
        step += 1
        if step % 2 == 0:
            save(run, step, len(workers))
        write_state(run, RunState(step, total, attempt, "training"))
    if step < total:
        save(run, step, len(workers))
        write_state(run, RunState(step, total, attempt, "stopped"))
        return 75
    write_state(run, RunState(step, total, attempt, "complete"))
    write_atomic(run.complete_marker, f"step {step}\n")
    return 0


if __name__ == "__main__":
    dump_stacks_on_signal("driver")
    sys.exit(main(RunDir(Path(sys.argv[1]))))
