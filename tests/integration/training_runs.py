"""Whole runs for the tests beside this file: `hpc-grpo train` in a process of its own, watched from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.demo.tasks import TaskSizes, write_tasks
from hpc_grpo.metrics.jsonl import read_metrics
from hpc_grpo.run_dir import RunDir, read_jsonl

HERE = Path(__file__).resolve().parent
LETTERS = f"{HERE / 'letters_reward.py'}:share_of_letters"
RUN_DEADLINE_S = 240.0
"""For a whole tiny run on a machine that does other things too; alone it takes a tenth of it."""

_POLL_S = 0.02
_TINY = ModelSize(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=96, max_tokens=64)


def write_workspace(folder: Path) -> Path:
    """Data, and models with random weights in `tied` and `untied`."""
    write_tasks(folder, TaskSizes(num_train=64, num_eval=8, num_sft=640), seed=0)
    write_model(folder / "tied", _TINY, seed=0)
    untied = ModelSize(**{**vars(_TINY), "tie_embeddings": False})
    write_model(folder / "untied", untied, seed=0)
    return folder


def tiny_config(workspace: Path, name: str, model: Path | str = "tied", **sections: Mapping[str, Any]) -> Path:
    """The YAML file of a GRPO run that takes seconds; `sections` are merged into it."""
    values: dict[str, Any] = {
        "run": {"name": name, "root": str(workspace / "runs")},
        "model": {"path": str(workspace / model), "dtype": "float32", "device": "cpu"},
        "data": {
            "train": {"path": str(workspace / "train.jsonl")},
            "eval": {"path": str(workspace / "eval.jsonl")},
            "template": "plain",
            "prompt_format": "{prompt}\n",
            "max_prompt_tokens": 16,
        },
        "rewards": [{"name": LETTERS}],
        "grading": {"num_workers": 1},
        "rollout": {"prompts_per_step": 6, "group_size": 4, "max_new_tokens": 24},
        "engine": {"engines_per_node": 1, "max_num_seqs": 32, "kv_cache_gib": 0.0625},
        "train": {"total_steps": 8, "lr": 5e-3, "zero_stage": 1, "max_tokens_per_microbatch": 512},
        "weights": {"deadline_s": 60},
        "checkpoint": {"every_steps": 2},
        "eval": {"reward": LETTERS},
        "launch": {"object_store_gib": 0.1},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes} if isinstance(changes, Mapping) else changes
    path = workspace / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@dataclass
class Attempt:
    """One `hpc-grpo train`. Ends what it started when left."""

    config: Path
    driver: str = "hpc_grpo.train"

    def __post_init__(self) -> None:
        run = yaml.safe_load(self.config.read_text())["run"]
        self.run_dir = RunDir(Path(run["root"]) / run["name"])
        self.number = self.run_dir.next_attempt_number()
        self.log = self.config.with_suffix(f".{time.time_ns()}.log")
        command = [sys.executable, "-m", "hpc_grpo.cli", "train", str(self.config), "--driver", self.driver]
        with self.log.open("wb") as log:
            self.supervisor = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.config.parent
            )

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(2):  # the second asks the supervisor to tear down at once
            if self.supervisor.poll() is None:
                self.supervisor.terminate()
        try:
            self.supervisor.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.supervisor.kill()  # its children notice

    @property
    def text(self) -> str:
        """What the supervisor and, through it, the driver printed."""
        return self.log.read_text(errors="replace")

    def wait(self, deadline_s: float = RUN_DEADLINE_S) -> int:
        """The supervisor's exit code."""
        try:
            return self.supervisor.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline_s:.0f} s:\n{self.text}") from None

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float = RUN_DEADLINE_S) -> None:
        ends_at = time.monotonic() + deadline_s
        while not condition():
            if self.supervisor.poll() is not None:
                raise AssertionError(f"ended with {self.supervisor.returncode} before {what}:\n{self.text}")
            if time.monotonic() > ends_at:
                raise AssertionError(f"no {what} within {deadline_s:.0f} s:\n{self.text}")
            time.sleep(_POLL_S)

    def wait_for_step(self, step: int) -> None:
        """Until a step of this number, or a later one, has been recorded by this attempt."""

        def recorded() -> bool:
            lines = [line for line in read_jsonl(self.run_dir.ledger) if line["attempt"] == self.number]
            return any(line["step"] >= step for line in lines)

        self.wait_until(recorded, f"step {step}")

    def kill_driver(self) -> None:
        """SIGKILL the driver, and nothing else."""
        children = psutil.Process(self.supervisor.pid).children()
        (driver,) = [child for child in children if child.cmdline()[-1] == str(self.run_dir.path)]
        driver.kill()

    def record(self) -> dict[str, Any]:
        """The attempt.json of this attempt."""
        (folder,) = self.run_dir.attempts.glob(f"{self.number}-*")
        values: dict[str, Any] = json.loads((folder / "attempt.json").read_text())
        return values


def run_to_end(config: Path) -> Attempt:
    """Run `config` to COMPLETE."""
    with Attempt(config) as attempt:
        code = attempt.wait()
    assert code == 0, attempt.text
    assert attempt.run_dir.is_complete(), attempt.text
    return attempt


def metrics_of(run_dir: RunDir) -> dict[int, dict[str, Any]]:
    """The surviving metrics of each training step, without the eval before the first."""
    return {step: values for step, values in read_metrics(run_dir.metrics).items() if step > 0}


def exported_weights(run_dir: RunDir) -> dict[str, Any]:
    """Name -> numpy array of the newest export."""
    from safetensors.numpy import load_file

    folder = run_dir.latest_export()
    assert folder is not None
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}
