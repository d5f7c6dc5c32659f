"""How long a driver takes until it has the first step's prompts of a large JSONL file, and what memory that needs.

`python benchmarks/million_rows.py MODEL FOLDER [--rows N]`: MODEL is a folder with a tokenizer, FOLDER takes the file
and the cache. Start and restart are processes of their own, each as a driver's inputs: tokenizer, streams, the
fingerprints that a resume compares, and the prompts of a step. CPU seconds count the processes that tokenize, too.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import click
from common import load_average, print_table

_PROMPTS = 16


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--rows", default=1_000_000, show_default=True)
@click.option("--measure", is_flag=True, hidden=True, help="Be the process that is measured.")
def main(model: Path, folder: Path, rows: int, measure: bool) -> None:
    """Measure a first start and a restart, and print both."""
    if measure:
        print(json.dumps(_start(model, folder)))
        return
    folder.mkdir(parents=True, exist_ok=True)
    _write_rows(folder / "rows.jsonl", rows)
    command = [sys.executable, __file__, str(model), str(folder), "--measure"]
    found = [json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) for _ in range(2)]
    table = [(name, *(f"{start[name]:,.1f}" for start in found)) for name in found[0]]
    print_table(f"{rows:,} rows; {load_average()}", ("", "first start", "restart"), table)


def _write_rows(path: Path, count: int) -> None:
    chance = random.Random(0)
    with path.open("w") as file:
        for number in range(count):
            hens, eggs, broken = chance.randint(2, 99), chance.randint(2, 99), chance.randint(2, 999)
            question = (
                f"Case {number}: a farm has {hens} hens, and each lays {eggs} eggs a week. {broken} eggs break on the "
                f"way to the market. How many eggs does the farmer sell, and how many are left if she keeps a tenth?"
            )
            file.write(json.dumps({"question": question, "answer": str(hens * eggs - broken)}) + "\n")


def _start(model: Path, folder: Path) -> dict[str, float]:
    begun = time.monotonic()
    from hpc_grpo.config import Config
    from hpc_grpo.data.fingerprint import fingerprints
    from hpc_grpo.data.loading import load_streams
    from hpc_grpo.data.tokenizer import load_tokenizer

    config = Config.model_validate(
        {
            "run": {"name": "rows", "root": str(folder)},
            "model": {"path": str(model)},
            "data": {"train": {"path": str(folder / "rows.jsonl")}},
            "train": {"total_steps": 1},
        }
    )
    tokenizer = load_tokenizer(config)
    imported, before = time.monotonic(), _memory_mib()
    streams = load_streams(config, tokenizer)
    loaded = time.monotonic()
    fingerprints(config, Path(), streams.digests)
    compared = time.monotonic()
    prompts = [streams.train.prompt(ordinal) for ordinal in range(_PROMPTS)]  # type: ignore[union-attr]
    ended, cpu = time.monotonic(), os.times()
    return {
        "imports and tokenizer, s": imported - begun,
        "streams, s": loaded - imported,
        "fingerprints, s": compared - loaded,
        f"prompts of a step ({len(prompts)}), s": ended - compared,
        "together, s": ended - begun,
        "CPU of all processes, s": sum(cpu[:4]),
        "own memory before the rows, MiB": before,
        "own memory with them, MiB": _memory_mib(),
        "largest with mapped files, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _memory_mib() -> float:
    """Return what this process holds besides mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


if __name__ == "__main__":
    main()
