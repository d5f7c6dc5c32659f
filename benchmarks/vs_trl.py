"""A GRPO step of hpc_grpo next to TRL's, and next to the sum of its bare halves, on the CPUs of this machine.

`python benchmarks/vs_trl.py`: 16 prompts x 8 completions x 128 tokens in float32, completions of fixed length, the
same trivial reward, no reference model. hpc_grpo runs as users run it (`hpc-grpo train`: supervisor, Ray, vLLM,
DeepSpeed), TRL with its microbatch tuned. Needs `pip install -e .[cpu,bench]`.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from bare_parts import PACKED, prompts
from common import BENCHMARKS, load_average, median, print_table, run_script

from hpc_grpo.config import Config
from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.metrics.jsonl import read_metrics
from hpc_grpo.rollout.engine_args import engine_environment, engine_options

_TIMEOUT_S = 1500.0
_WARM_UP_STEPS = 2
SIZES = {
    "600k": ModelSize(hidden_size=128, num_layers=4),
    "31M": ModelSize(hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, intermediate_size=2048),
}


@dataclass(frozen=True)
class Shape:
    """One step's work, and how many steps to measure."""

    prompts: int
    group: int
    tokens: int
    steps: int

    @property
    def num_tokens(self) -> int:
        return self.prompts * self.group * self.tokens


@dataclass(frozen=True)
class Layout:
    """How hpc_grpo shares out the cores; `--layout 2x1+2` is two engines of one thread, a learner of two."""

    engines: int
    engine_threads: int
    learner_threads: int
    max_policy_lag: int

    @staticmethod
    def parse(text: str) -> Layout:
        cores, _, lag = text.partition("@")
        engines, _, learner = cores.partition("+")
        count, _, threads = engines.partition("x")
        return Layout(int(count), int(threads), int(learner), int(lag or 0))

    def __str__(self) -> str:
        cores = f"{self.engines}x{self.engine_threads}+{self.learner_threads}"
        return f"{cores}, {f'lag {self.max_policy_lag}' if self.max_policy_lag else 'synchronous'}"


def config(folder: Path, shape: Shape, layout: Layout, budget: int) -> Config:
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts(shape.prompts)))
    settings: dict[str, Any] = {
        "run": {"name": f"bench-{str(layout).replace(', ', '-').replace(' ', '')}-{budget}", "root": str(folder)},
        "model": {"path": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "data": {
            "train": {"path": str(data), "prompt_field": "prompt", "answer_field": None},
            "template": "plain",
            "max_prompt_tokens": 32,
        },
        "rewards": [{"name": f"{BENCHMARKS / 'common.py'}:letter_share"}],
        "rollout": {
            "prompts_per_step": shape.prompts,
            "group_size": shape.group,
            "max_new_tokens": shape.tokens,
            "min_new_tokens": shape.tokens,
            "max_policy_lag": layout.max_policy_lag,
        },
        "engine": {"engines_per_node": layout.engines, "num_threads": layout.engine_threads, "kv_cache_gib": 0.5},
        "train": {
            "total_steps": _WARM_UP_STEPS + shape.steps,
            "lr": 1e-6,
            "zero_stage": 1,
            "num_threads": layout.learner_threads,
            "max_tokens_per_microbatch": budget,
        },
        "checkpoint": {"every_steps": None},
        "metrics": {"wandb_mode": "disabled"},
        "launch": {"object_store_gib": 0.25},
    }
    return Config.model_validate(settings)


def hpc_grpo_step(folder: Path, shape: Shape, layout: Layout, budget: int) -> dict[str, float]:
    """Train for a few steps as a user would; gives the medians of `time/*`."""
    settings = config(folder, shape, layout, budget)
    path = folder / f"{settings.run.name}.yaml"
    path.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    command = [sys.executable, "-m", "hpc_grpo.cli", "train", str(path)]
    with (folder / f"{settings.run.name}.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        try:
            code = process.wait(_TIMEOUT_S)
        finally:
            # The supervisor takes its processes down when it is asked to end.
            if process.poll() is None:
                process.terminate()
                process.wait()
        if code != 0:
            log.seek(0)
            raise RuntimeError(f"hpc-grpo train ended with {code}:\n{log.read()[-3000:]}")
    metrics = read_metrics(settings.run_path / "metrics.jsonl")
    lines = [line for step, line in metrics.items() if step > _WARM_UP_STEPS]
    names = ("step", "generate_wait", "train", "publish")
    return {name: median([line[f"time/{name}_s"] for line in lines]) for name in names}


def trl_step(folder: Path, shape: Shape, microbatch: int, threads: int) -> float:
    arguments = {**asdict(shape), "microbatch": microbatch, "threads": threads}
    env = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    result = run_script("trl_steps.py", [str(folder / "model"), json.dumps(arguments)], env, _TIMEOUT_S)
    return median(result["seconds"])


def bare_generation(folder: Path, shape: Shape, layout: Layout) -> float:
    """Seconds until all engines of the layout, started together, have generated their shares."""
    from concurrent.futures import ThreadPoolExecutor

    settings = config(folder, shape, layout, 8192)
    env = engine_environment(settings, on_gpu=False)
    with tempfile.TemporaryDirectory(dir=folder) as barrier, ThreadPoolExecutor(layout.engines) as pool:
        shares = [
            {
                **asdict(shape),
                "prompts": shape.prompts // layout.engines,
                "engine_options": engine_options(settings, on_gpu=False),
                "engines": layout.engines,
                "index": index,
                "barrier": barrier,
            }
            for index in range(layout.engines)
        ]
        arguments = [[settings.model.path, "generate", json.dumps(share)] for share in shares]
        results = list(pool.map(lambda one: run_script("bare_parts.py", one, env, _TIMEOUT_S), arguments))
    return max(float(result["seconds"]) for result in results)


def bare_training(folder: Path, shape: Shape, threads: int, rows: Sequence[int], budgets: Sequence[int]) -> Any:
    """Seconds by layout and size of microbatch, as (layout, size, seconds)."""
    arguments = {**asdict(shape), "threads": threads, "rows": rows, "budgets": budgets}
    env = {"OMP_NUM_THREADS": str(threads)}
    result = run_script("bare_parts.py", [str(folder / "model"), "train", json.dumps(arguments)], env, _TIMEOUT_S)
    return result["layouts"]


@dataclass(frozen=True)
class Trials:
    """What is tried out on each side; the best of each is compared."""

    layouts: Sequence[Layout]
    microbatches: Sequence[int]
    budgets: Sequence[int]
    threads: Sequence[int]


def compare(folder: Path, name: str, shape: Shape, trials: Trials) -> None:
    num_parameters = write_model(folder / "model", SIZES[name], seed=0)
    rows: list[list[str]] = []

    def add(what: str, seconds: float, detail: str = "") -> float:
        rows.append([what, f"{seconds:.2f}", f"{shape.num_tokens / seconds:,.0f}", detail, load_average()])
        click.echo(f"  {what}: {seconds:.2f} s {detail}", err=True)
        return seconds

    packed: dict[int, float] = {}
    training = math.inf
    for threads in trials.threads:
        seconds_by_layout = bare_training(folder, shape, threads, trials.microbatches, trials.budgets)
        for kind, size, seconds in seconds_by_layout:
            training = min(training, add(f"bare torch, {threads} threads: {kind}, {size}", seconds))
            if kind == PACKED:
                packed[size] = min(seconds, packed.get(size, math.inf))
    budget = min(packed, key=lambda size: packed[size])
    generated = {
        (layout.engines, layout.engine_threads): add(
            f"bare vLLM: {layout.engines} x {layout.engine_threads} threads", bare_generation(folder, shape, layout)
        )
        for layout in {(it.engines, it.engine_threads): it for it in trials.layouts}.values()
    }
    trl = min(
        add(f"TRL, {threads} threads, microbatch {microbatch}", trl_step(folder, shape, microbatch, threads))
        for threads in trials.threads
        for microbatch in trials.microbatches
    )
    ours: dict[Layout, float] = {}
    for layout in trials.layouts:
        times = hpc_grpo_step(folder, shape, layout, budget)
        detail = ", ".join(f"{phase} {times[phase]:.2f}" for phase in ("generate_wait", "train", "publish"))
        ours[layout] = add(f"hpc_grpo {layout}", times["step"], detail)
    print_table(
        f"{num_parameters:,} parameters, float32, {shape.prompts} x {shape.group} x {shape.tokens} tokens a step, "
        f"medians of {shape.steps}; microbatches of {budget} tokens",
        ["", "s/step", "tokens/s", "seconds in", "machine"],
        rows,
    )
    print_table(
        "ratios",
        ["layout: engines x threads + learner threads", "speed / TRL", "step / bare sum", "bare sum s"],
        [
            [
                str(layout),
                f"{trl / seconds:.2f}",
                f"{seconds / (bare := generated[layout.engines, layout.engine_threads] + training):.2f}",
                f"{bare:.2f}",
            ]
            for layout, seconds in ours.items()
        ],
    )


@click.command()
@click.option("--size", "sizes", multiple=True, type=click.Choice(list(SIZES)), help="Default: all.")
@click.option("--layout", "layouts", multiple=True, help="ENGINESxTHREADS+LEARNER_THREADS[@LAG]; default: several.")
@click.option("--microbatch", "microbatches", multiple=True, type=int, default=(8, 16, 32), show_default=True)
@click.option("--budget", "budgets", multiple=True, type=int, default=(1024, 2048, 4096), show_default=True)
@click.option("--steps", default=5, show_default=True)
@click.option("--threads", multiple=True, type=int, default=(2,), show_default=True, help="Of TRL and bare training.")
@click.option("--quick", is_flag=True, help="The small model, short completions, one layout.")
def main(
    sizes: tuple[str, ...],
    layouts: tuple[str, ...],
    microbatches: tuple[int, ...],
    budgets: tuple[int, ...],
    steps: int,
    threads: tuple[int, ...],
    quick: bool,
) -> None:
    # So that `timeout` and an end of the session also end the run in progress, by the `finally` around it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    texts = layouts or (("1x2+2",) if quick else ("1x2+2", "2x1+2", "2x1+1", "2x1+1@1", "1x1+1@1", "1x2+2@1"))
    shape = Shape(4, 4, 16, 2) if quick else Shape(16, 8, 128, steps)
    trials = Trials(
        [Layout.parse(text) for text in texts],
        (16,) if quick else microbatches,
        (2048,) if quick else budgets,
        threads,
    )
    for name in sizes or (("600k",) if quick else tuple(SIZES)):
        with tempfile.TemporaryDirectory(prefix="hpc-grpo-bench-") as folder:
            compare(Path(folder), name, shape, trials)


if __name__ == "__main__":
    main()
