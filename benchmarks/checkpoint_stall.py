"""How long training stands for a checkpoint: written while it waits, and behind it, in turn and in one run.

`python benchmarks/checkpoint_stall.py [--rounds 5]` trains one learner on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.learner.checkpoint import CheckpointWriter
from hpc_grpo.learner.learner import Learner
from tests.integration.learner_processes import make_config, make_step

SIZE = ModelSize(hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, intermediate_size=2048, max_tokens=64)


def save(learner: Learner, path: Path, *, behind: bool) -> tuple[float, float]:
    """Return the seconds until training may go on, and until the checkpoint is published."""
    begun = time.monotonic()
    writer = CheckpointWriter(learner, path, {"step": 1}, behind=behind)
    publishing = threading.Thread(target=lambda: writer.publish([writer.write()]))
    publishing.start()
    if not behind:
        publishing.join()
    stood_s = time.monotonic() - begun
    learner.train_step(make_step(1, 0, 1))
    publishing.join()
    return stood_s, time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        num_parameters = write_model(root / "model", SIZE, seed=0)
        learner = Learner(make_config(root / "model", root, zero_stage=1))
        learner.train_step(make_step(1, 0, 1))
        save(learner, root / "warm-up", behind=True)
        times: dict[bool, list[float]] = {False: [], True: []}
        for index in range(rounds):
            for behind, stood in times.items():
                stood.append(save(learner, root / f"{index}-{behind}", behind=behind)[0])
        waiting, staged = (statistics.median(times[behind]) for behind in (False, True))
    print(f"{num_parameters:,} parameters, ZeRO-1, one learner on the CPU, median of {rounds}")
    print(
        f"training stands: {waiting:.3f} s waiting for the disk, {staged:.3f} s behind: {waiting / staged:.1f} x less"
    )


if __name__ == "__main__":
    main()
