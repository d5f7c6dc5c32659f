"""Where the cores of this machine go while hpc_grpo trains: CPU time of a step, process by process.

`python benchmarks/step_cores.py`: the steps of vs_trl.py at fixed lengths, from the third on; what the processes of the
run have used by /proc between two of them, beside what the machine could have given in that time.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import click
import psutil
from bare_parts import prompts
from common import load_average, print_table
from sides import WARM_UP_STEPS, Layout, Shape, StepTimes, Work, hpc_grpo_times, write_rows
from vs_trl import SIZES

from hpc_grpo.demo.model import write_model
from hpc_grpo.run.contract import ATTEMPT_DIR_VARIABLE
from hpc_grpo.run.progress import read_metrics

_POLL_S = 0.1
_LEAST_MS = 1.0


@click.command()
@click.option("--size", type=click.Choice(list(SIZES)), default="600k", show_default=True)
@click.option("--layout", default="2x1+2", show_default=True, help="ENGINESxTHREADS+LEARNER_THREADS[@LAG].")
@click.option("--budget", default=4096, show_default=True, help="Tokens a microbatch.")
@click.option("--steps", default=20, show_default=True, help="Steps after those that warm up.")
def main(size: str, layout: str, budget: int, steps: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="hpc-grpo-bench-") as text, ThreadPoolExecutor(1) as pool:
        folder = Path(text)
        write_model(folder / "model", SIZES[size], seed=0)
        data = write_rows(folder / "rows.jsonl", [{"prompt": it, "answer": ""} for it in prompts(16)])
        work = Work(folder / "model", folder, Shape(16, 8, 128, steps), data)
        training = pool.submit(hpc_grpo_times, work, Layout.parse(layout), budget)
        first = _wait_for(folder, WARM_UP_STEPS + 1, training)
        last = _wait_for(folder, WARM_UP_STEPS + steps - 1, training)
        training.result()
    num_steps, seconds = last[1] - first[1], last[2] - first[2]
    spent = {name: (each - first[0][name]) / num_steps for name, each in last[0].items()}
    shown = {name: each for name, each in spent.items() if each * 1e3 >= _LEAST_MS}
    rows = [[name, f"{each * 1e3:.0f}"] for name, each in sorted(shown.items(), key=lambda it: -it[1])]
    of_all = (os.cpu_count() or 1) * seconds / num_steps
    rows += [["all of the run", f"{sum(spent.values()) * 1e3:.0f}"], ["the machine", f"{of_all * 1e3:.0f}"]]
    title = f"{size}, {layout}: a step of {seconds / num_steps:.2f} s ({num_steps} steps; {load_average()})"
    print_table(title, ["process", "CPU ms a step"], rows)


def _wait_for(folder: Path, step: int, training: Future[StepTimes]) -> tuple[Counter[str], int, float]:
    """Return the CPU seconds of the run's processes by name, its step and the time, as soon as it is at `step`.

    Raises RuntimeError where the run is over before.
    """
    while not training.done():
        for metrics in folder.glob("run-*/bench/metrics.jsonl"):
            if (done := max(read_metrics(metrics), default=0)) >= step:
                return _cpu_seconds(folder), done, time.monotonic()
        time.sleep(_POLL_S)
    raise RuntimeError(f"the run ended before step {step}") from training.exception()


def _cpu_seconds(folder: Path) -> Counter[str]:
    seconds: Counter[str] = Counter()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            is_own = process.environ().get(ATTEMPT_DIR_VARIABLE, "").startswith(str(folder))
            if is_own or any(word.startswith(f"{folder}/run-") for word in words):
                times = process.cpu_times()
                seconds[_name(words)] += times.user + times.system
    return seconds


def _name(words: list[str]) -> str:
    """Return what a process is: an actor as Ray calls it, else the module or file that Python runs, or the program."""
    if words[0].startswith("ray::"):
        return words[0].partition(".")[0]
    if "-m" in words:
        return words[words.index("-m") + 1]
    files = [word for word in words if word.endswith(".py")]
    return Path((files or words)[0]).name


if __name__ == "__main__":
    main()
