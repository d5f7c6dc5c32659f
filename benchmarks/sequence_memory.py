"""Peak memory of a learner's step against the length of its one sequence, alone and with learners that share the row.

    python benchmarks/sequence_memory.py [--lengths 1024,4096,8192] [--degrees 1,2]

Each case is a step of processes of their own, on the CPU: resident memory above that before the step, of rank 0.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import load_average, print_table
from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.types import Minibatch
from tests.integration.learner_processes import make_config, run_ranks
from tests.support.sequences import ordinary_sequence


def peak_mib(rank: int, world_size: int, store: Any, model: Path, length: int) -> float:
    from hpc_grpo.learner.learner import Learner

    train = {"sequence_parallel": world_size, "max_tokens_per_microbatch": length, "gradient_checkpointing": True}
    config = make_config(model, model.parent, **train)
    learner = Learner(config, rank, world_size, store)

    def step(num_tokens: int) -> float:
        sequence = ordinary_sequence(0, 0, np.arange(num_tokens) % 100 + 2, num_tokens // 2)
        learner.train_step([Minibatch((sequence,), sequence.num_trained_tokens, 1)])
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    before = step(64)  # optimizer states are there from now on
    return step(length) - before


@click.command()
@click.option("--lengths", default="1024,4096,8192", show_default=True, help="Tokens of the sequence.")
@click.option("--degrees", default="1,2", show_default=True, help="Learners that share it.")
def main(lengths: str, degrees: str) -> None:
    sizes, rows = [int(each) for each in degrees.split(",")], []
    with tempfile.TemporaryDirectory() as folder:
        for length in map(int, lengths.split(",")):
            write_model(Path(folder) / "model", ModelSize(256, 4, 4, 4, 1024, length), seed=0)
            found = [run_ranks(size, peak_mib, Path(folder) / "model", length)[0] for size in sizes]
            rows.append([str(length), *(f"{each:.0f}" for each in found)])
    header = ("tokens", *(f"{size} learner{'s' * (size > 1)}" for size in sizes))
    print_table(f"MiB above a short step ({load_average()})", header, rows)


if __name__ == "__main__":
    main()
