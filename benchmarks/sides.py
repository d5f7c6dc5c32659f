"""The sides that vs_trl.py and vs_trl_lengths.py compare, each measured in processes of its own: bare halves, TRL,
and hpc_grpo."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from common import BENCHMARKS, median, run_script

from hpc_grpo.config import Config
from hpc_grpo.engine.vllm import engine_environment, engine_options
from hpc_grpo.run.progress import read_metrics

_TIMEOUT_S = 1500.0
WARM_UP_STEPS = 2
_PHASES = ("generate_wait", "train", "publish")


@dataclass(frozen=True)
class Shape:
    """One step's work, and how many steps a measurement takes the median of.

    `tokens` a completion, or at most so many where its length is not `is_fixed`.
    """

    prompts: int
    group: int
    tokens: int
    steps: int
    is_fixed: bool = True

    @property
    def num_tokens(self) -> int:
        return self.prompts * self.group * self.tokens


@dataclass(frozen=True)
class Work:
    """The model and the rows that every side starts from, their reward, a folder for what they write, their step."""

    model: Path
    folder: Path
    shape: Shape
    data: Path
    reward: str = "letter_share"
    max_prompt_tokens: int = 32


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclass(frozen=True)
class BareTraining:
    """How bare torch trains; the size of a microbatch is in sequences if padded, in tokens if packed."""

    kind: str
    size: int
    threads: int

    def __str__(self) -> str:
        return f"bare torch, {self.threads} threads: {self.kind}, {self.size}"


@dataclass(frozen=True)
class Engines:
    """The engines of a layout, which generate side by side."""

    count: int
    threads: int

    def __str__(self) -> str:
        return f"bare vLLM: {self.count} x {self.threads} threads"


@dataclass(frozen=True)
class Trl:
    """How TRL trains; the microbatch is in sequences."""

    microbatch: int
    threads: int

    def __str__(self) -> str:
        return f"TRL, {self.threads} threads, microbatch {self.microbatch}"


@dataclass(frozen=True)
class Layout:
    """How hpc_grpo shares out the cores; `2x1+2@1` is two engines of one thread, a learner of two, lag 1."""

    engines: Engines
    learner_threads: int
    max_policy_lag: int = 0

    @staticmethod
    def parse(text: str) -> Layout:
        cores, _, lag = text.partition("@")
        engines, _, learner = cores.partition("+")
        count, _, threads = engines.partition("x")
        return Layout(Engines(int(count), int(threads)), int(learner), int(lag or 0))

    def __str__(self) -> str:
        cores = f"{self.engines.count}x{self.engines.threads}+{self.learner_threads}"
        return f"{cores}, {f'lag {self.max_policy_lag}' if self.max_policy_lag else 'synchronous'}"


@dataclass(frozen=True)
class Rate:
    """The tokens sampled in the steps that count, and the seconds that those took."""

    tokens: float
    seconds: float
    shape: Shape

    @property
    def tokens_a_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mean_length(self) -> float:
        return self.tokens / (self.shape.steps * self.shape.prompts * self.shape.group)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of hpc_grpo and of its phases; `rest` is what no phase accounts for."""

    step: float
    generate_wait: float
    train: float
    publish: float
    rest: float


def training_seconds(work: Work, bare: BareTraining) -> float:
    arguments = {**asdict(work.shape), **asdict(bare)}
    env = {"OMP_NUM_THREADS": str(bare.threads)}
    result = run_script("bare_parts.py", [str(work.model), "train", json.dumps(arguments)], env, _TIMEOUT_S)
    return float(result["seconds"])


def generation_seconds(work: Work, engines: Engines) -> float:
    """Return the seconds until all engines, started together, have generated their shares."""
    settings = _config(work, Layout(engines, learner_threads=1), budget=8192)
    env = engine_environment(settings, on_gpu=False)

    def seconds(share: dict[str, Any]) -> float:
        result = run_script("bare_parts.py", [str(work.model), "generate", json.dumps(share)], env, _TIMEOUT_S)
        return float(result["seconds"])

    with tempfile.TemporaryDirectory(dir=work.folder) as barrier, ThreadPoolExecutor(engines.count) as pool:
        shares = [
            {
                **asdict(work.shape),
                "prompts": len(range(index, work.shape.prompts, engines.count)),
                "engine_options": engine_options(settings, on_gpu=False),
                "engines": engines.count,
                "index": index,
                "barrier": barrier,
            }
            for index in range(engines.count)
        ]
        return max(pool.map(seconds, shares))


def trl_seconds(work: Work, trl: Trl) -> float:
    return median(_trl_steps(work, trl)["seconds"])


def trl_rate(work: Work, trl: Trl) -> Rate:
    steps = _trl_steps(work, trl)
    return Rate(sum(steps["tokens"]), sum(steps["seconds"]), work.shape)


def _trl_steps(work: Work, trl: Trl) -> dict[str, Any]:
    arguments = {**asdict(work.shape), **asdict(trl), "data": str(work.data), "reward": work.reward}
    env = {"OMP_NUM_THREADS": str(trl.threads), "TOKENIZERS_PARALLELISM": "false"}
    return run_script("trl_steps.py", [str(work.model), json.dumps(arguments)], env, _TIMEOUT_S)


def hpc_grpo_times(work: Work, layout: Layout, budget: int) -> StepTimes:
    """Train for a few steps as a user would, with microbatches of `budget` tokens; gives medians over the steps."""
    return median_times([_step_times(line) for line in _hpc_grpo_steps(work, layout, budget, {})])


def hpc_grpo_rate(work: Work, layout: Layout, budget: int, train: Mapping[str, Any]) -> tuple[Rate, StepTimes]:
    """Train as `hpc_grpo_times` does, with further keys of `train`; gives the rate over all steps, medians of parts."""
    steps = _hpc_grpo_steps(work, layout, budget, train)
    tokens = sum(line["tokens/completion_total"] for line in steps)
    rate = Rate(tokens, sum(line["time/step_s"] for line in steps), work.shape)
    return rate, median_times([_step_times(line) for line in steps])


def _hpc_grpo_steps(work: Work, layout: Layout, budget: int, train: Mapping[str, Any]) -> list[dict[str, Any]]:
    # A folder of its own: in that of an earlier round, the run would be found complete.
    with tempfile.TemporaryDirectory(prefix="run-", dir=work.folder) as folder:
        settings = _config(replace(work, folder=Path(folder)), layout, budget, train)
        _train(settings)
        metrics = read_metrics(settings.run_path / "metrics.jsonl")
    return [line for step, line in metrics.items() if step > WARM_UP_STEPS]


def median_times(times: list[StepTimes]) -> StepTimes:
    """Return the median of each figure by itself, so that phases need not add up to the step."""
    rows = [asdict(one) for one in times]
    return StepTimes(**{name: median([row[name] for row in rows]) for name in rows[0]})


def _step_times(line: dict[str, Any]) -> StepTimes:
    phases = {name: line[f"time/{name}_s"] for name in _PHASES}
    step = line["time/step_s"]
    return StepTimes(step=step, rest=step - sum(phases.values()), **phases)


def _train(settings: Config) -> None:
    """Run `hpc-grpo train`; raises RuntimeError with the end of its log when it failed."""
    folder = settings.run.root
    path, log_path = folder / "config.yaml", folder / "train.log"
    path.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    command = [sys.executable, "-m", "hpc_grpo.cli", "train", str(path)]
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        try:
            code = process.wait(_TIMEOUT_S)
        finally:
            # The supervisor takes its processes down when it is asked to end.
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code != 0:
        raise RuntimeError(f"hpc-grpo train ended with {code}:\n{log_path.read_text()[-3000:]}")


def _config(work: Work, layout: Layout, budget: int, train: Mapping[str, Any] | None = None) -> Config:
    shape = work.shape
    settings: dict[str, Any] = {
        "run": {"name": "bench", "root": str(work.folder)},
        "model": {"path": str(work.model), "dtype": "float32", "device": "cpu"},
        "data": {
            "train": {"path": str(work.data), "prompt_field": "prompt", "answer_field": "answer"},
            "template": "plain",
            "max_prompt_tokens": work.max_prompt_tokens,
        },
        "rewards": [{"name": f"{BENCHMARKS / 'common.py'}:{work.reward}"}],
        "rollout": {
            "prompts_per_step": shape.prompts,
            "group_size": shape.group,
            "max_new_tokens": shape.tokens,
            "min_new_tokens": shape.tokens if shape.is_fixed else 0,
            "max_policy_lag": layout.max_policy_lag,
        },
        "loss": {"correction": {"name": "none"}} if shape.is_fixed else {},
        "engine": {
            "engines_per_node": layout.engines.count,
            "num_threads": layout.engines.threads,
            "kv_cache_gib": 0.5,
        },
        "train": {
            "total_steps": WARM_UP_STEPS + shape.steps,
            "lr": 1e-6,
            "zero_stage": 1,
            "num_threads": layout.learner_threads,
            "max_tokens_per_microbatch": budget,
            **(train or {}),
        },
        "checkpoint": {"every": None},
        "metrics": {"wandb": {"mode": "disabled"}},
        "launch": {"object_store_gib": 0.25},
    }
    return Config.model_validate(settings)
