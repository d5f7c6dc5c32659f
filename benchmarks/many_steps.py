"""Measure what a run of very many steps costs those who look at it and who resume it.

`python benchmarks/many_steps.py RUN`: RUN is a finished run, such as that of `make demo`. Runs of more and more steps
are made from it by the driver's own journal: each step's metrics, ordinals and rollouts are those of one of RUN's, and
an attempt has a thousand steps. Nothing is synced to disk meanwhile. Then every command runs by itself.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import click
from common import load_average, print_table

from hpc_grpo.driver.batches import Batch
from hpc_grpo.driver.journal import Journal
from hpc_grpo.driver.rollouts import DriverState
from hpc_grpo.driver.schedule import StepTimes, TrainLength
from hpc_grpo.metrics.record import StepTimer
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.contract import ATTEMPT_VARIABLE
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics

_STEPS_OF_AN_ATTEMPT = 1000
_ROLLOUTS_OF_A_STEP = 4
_COMMANDS = {
    "status": ["-m", "hpc_grpo.cli", "status"],
    "explain": ["-m", "hpc_grpo.cli", "explain"],
    "watch": ["-m", "hpc_grpo.cli", "watch"],
    "report": ["-m", "hpc_grpo.cli", "report"],
    "ledger": ["-m", "hpc_grpo.run.ledger"],
    "a new attempt's records": [__file__, "--opens"],
}


_PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
"""


def make_run(like: RunDir, folder: Path, num_steps: int) -> RunDir:
    """Write a complete run of so many steps."""
    run, template = RunDir(folder / f"{num_steps}-steps"), read_attempts(like)[-1]
    run.create()
    for path in (like.config, like.source, like.inputs):
        shutil.copy(path, run.path)
    config = read_config(like)
    metrics = [line for step, line in read_metrics(like.metrics).items() if step and "tokens/completion_total" in line]
    lines = list(itertools.islice(read_jsonl(like.rollouts(1)), _ROLLOUTS_OF_A_STEP))
    prompts = config.rollout.prompts_per_step
    length = TrainLength(num_steps, prompts, 10_000)
    for attempt in range(1, -(-num_steps // _STEPS_OF_AN_ATTEMPT) + 1):
        first = (attempt - 1) * _STEPS_OF_AN_ATTEMPT
        last = min(first + _STEPS_OF_AN_ATTEMPT, num_steps)
        job_id = str(100 + attempt)
        of_attempt = run.attempt(attempt, job_id)
        of_attempt.mkdir(parents=True)
        kind = "complete" if last == num_steps else "resumable"
        replace(template, attempt=attempt, job_id=job_id, exit_kind=kind).save(of_attempt)  # type: ignore[arg-type]
        with mock.patch.dict(os.environ, {ATTEMPT_VARIABLE: str(attempt)}):
            journal = _journal(config, run, length)
        for step in range(first + 1, last + 1):
            ordinals = range((step - 1) * prompts, step * prompts)
            batch = Batch([], list(ordinals), {}, [{**line, "step": step} for line in lines])
            journal.record_step(DriverState(step, step * prompts), _of_loop(metrics[step % len(metrics)]), batch)
        journal.publish_state(last, "complete" if last == num_steps else "stopped")
        journal.close()
    run.complete_marker.touch()
    return run


def _journal(config: Any, run: RunDir, length: TrainLength) -> Journal:
    """The journal whose timer says that each step took a second, and whose console is silent."""
    timer = mock.Mock(spec=StepTimer)
    timer.finish_step.return_value = {"time/step_s": 1.0, "time/train_s": 0.6, "time/generate_wait_s": 0.4}
    timer.eta_s.return_value = 1.0
    with mock.patch("hpc_grpo.metrics.sinks.ConsoleSink"):
        return Journal(config, run, length, StepTimes.after(None), timer)


def _of_loop(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if "/" in name and not name.startswith("time/")}


def _open(run: RunDir) -> None:
    """Read what a new attempt reads of the attempts before it, and open what it appends to."""
    config = read_config(run)
    read_attempts(run)
    run.next_attempt_number()
    _journal(config, run, TrainLength(1, 1, 1)).close()


def measure(run: RunDir) -> dict[str, tuple[float, float, float]]:
    """Return wall seconds, CPU seconds and peak MiB of every command."""
    return {name: _run([sys.executable, *command, str(run.path)]) for name, command in _COMMANDS.items()}


def _run(command: Sequence[str]) -> tuple[float, float, float]:
    """From a small process: a child's peak is never below that of the one which started it."""
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-S", "-c", _PEAK, *command], capture_output=True, text=True, check=True)
    cpu_s, peak_kib = map(float, done.stdout.split())
    return time.monotonic() - begun, cpu_s, peak_kib / 1024


def _size(run: RunDir) -> str:
    files = [path.stat() for path in run.path.rglob("*") if path.is_file()]
    return f"{sum(stat.st_size for stat in files) / 1e6:,.0f} MB in {len(files):,} files"


@click.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.option("--steps", "numbers", multiple=True, type=int, default=(1_000, 10_000, 100_000), show_default=True)
@click.option("--opens", is_flag=True, hidden=True)
def main(run: Path, numbers: tuple[int, ...], opens: bool) -> None:
    if opens:
        _open(RunDir(run))
        return
    columns = []
    with tempfile.TemporaryDirectory(prefix="hpc-grpo-bench-") as folder, mock.patch("os.fsync"):
        for number in numbers:
            made = make_run(RunDir(run), Path(folder), number)
            columns.append({"run directory": _size(made)})
            for name, (wall_s, cpu_s, mib) in measure(made).items():
                columns[-1][name] = f"{wall_s:.1f} s ({cpu_s:.1f}), {mib:,.0f} MiB"
            click.echo(f"{number:,} steps: {columns[-1]}", err=True)
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    print_table(f"Seconds (of CPU) and peak memory; {load_average()}", ["steps", *(f"{it:,}" for it in numbers)], rows)


if __name__ == "__main__":
    main()
