"""What the benchmarks share: medians, tables, processes with a deadline, and rewards that cost nothing.

Imports nothing heavy: the reward workers of a run import this file.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

BENCHMARKS = Path(__file__).resolve().parent


def letter_share(prompts: Sequence[str], completions: Sequence[str], **fields: Any) -> list[float]:
    """Return the share of lower-case letters, so that advantages are not all zero."""
    return [sum(c.islower() for c in completion) / max(len(completion), 1) for completion in completions]


def last_number(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **fields: Any
) -> list[float]:
    """Return 1.0 where the last number of a completion is the answer, else 0.0."""
    found = [re.findall(r"-?\d+", completion) for completion in completions]
    return [float(bool(numbers) and numbers[-1] == wanted) for numbers, wanted in zip(found, answer, strict=True)]


REWARDS = {"letter_share": letter_share, "last_number": last_number}


def read_rows(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    print(f"\n{title}")
    for row in (header, ["-" * width for width in widths], *rows):
        first, *others = zip(row, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]))
    sys.stdout.flush()


def load_average() -> str:
    """Tell how busy the machine was: figures of a busy one are worth little."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def run_script(script: str, arguments: Sequence[str], env: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """Run a script of this folder in its own process; gives the JSON object on its last line of output.

    Raises RuntimeError with the end of its errors when it failed.
    """
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def two_node_benchmark(script: str, measure: Callable[[Path, int], None]) -> click.Command:
    """Make the command `script FOLDER [--rounds N] [sbatch options]`, which measures in a job of two nodes.

    In a Slurm job it calls `measure` with both; elsewhere it submits itself and prints what the job has said.
    """

    @click.command(context_settings={"ignore_unknown_options": True})
    @click.argument("folder", type=click.Path(path_type=Path))
    @click.option("--rounds", default=3, show_default=True)
    @click.argument("sbatch_options", nargs=-1, type=click.UNPROCESSED)
    def main(folder: Path, rounds: int, sbatch_options: tuple[str, ...]) -> None:
        if "SLURM_JOB_ID" in os.environ:
            sys.path.insert(0, str(BENCHMARKS.parent))
            measure(folder, rounds)
            return
        folder.mkdir(parents=True, exist_ok=True)
        output = folder / f"{Path(script).stem}.out"
        again = shlex.join([sys.executable, script, str(folder.absolute()), "--rounds", str(rounds)])
        command = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", f"--output={output}"]
        subprocess.run([*command, *sbatch_options, f"--wrap={again}"], check=False)
        print(output.read_text())

    return main
