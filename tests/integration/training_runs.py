"""Whole runs, and engines alone, for the tests beside this file: in processes of their own, watched from outside."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hpc_grpo.config import load_config
from hpc_grpo.demo.make import write_tasks
from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.engine.vllm import engine_environment
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics
from tests.support.tiny_models import TINY

HERE = Path(__file__).resolve().parent
PAUSING = "pausing"
"""A module in each workspace: a driver that is named as a file gets no templates."""
LETTERS = f"{HERE / 'letters_reward.py'}:share_of_letters"
RUN_DEADLINE_S = 900.0
"""For a whole tiny run on a machine that does other things too; alone it takes a thirtieth of it."""
ENGINE_DEADLINE_S = 900.0

_POLL_S = 0.02
LONG = replace(TINY, max_tokens=1024)


def write_workspace(folder: Path) -> Path:
    """Data, models with random weights in `tied` and `untied`, and the driver `PAUSING`."""
    shutil.copy(HERE.parent / "stand_ins" / "pausing.py", folder)
    write_tasks(folder, num_train=64, num_eval=8, num_sft=640, seed=0)
    write_model(folder / "tied", TINY, seed=0)
    untied = ModelSize(**{**vars(TINY), "tie_embeddings": False})
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
        "engine": {"engines_per_node": 1, "vllm": {"max_num_seqs": 32}, "kv_cache_gib": 0.0625},
        "train": {"total_steps": 8, "lr": 5e-3, "zero_stage": 1, "max_tokens_per_microbatch": 512},
        "checkpoint": {"every": 2},
        "eval": {"reward": LETTERS},
        "launch": {"object_store_gib": 0.1},
    }
    if sections.get("task", {}).get("name") == "sft":
        values["rollout"] = {"max_new_tokens": 24}
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes} if isinstance(changes, Mapping) else changes
    path = workspace / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def small_environment(folder: Path, traces: Path) -> Path:
    """Make a virtual environment of a few files with the packages of this one.

    Each Python that starts from it, or from a copy, appends its place to the file of its host below `traces`.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    traces.mkdir()
    [packages] = folder.glob("lib/python*/site-packages")
    ours = sysconfig.get_path("purelib")
    trace = f"open(f'{traces}/{{socket.gethostname()}}', 'a').write(sys.prefix + chr(10))"
    (packages / "ours.pth").write_text(f"import site, socket, sys; site.addsitedir({ours!r}); {trace}\n")
    return folder


class Attempt:
    """One process that trains, watched. Ends what it started when left.

    By itself it is the whole `hpc-grpo train`, which brings Ray up and supervises the driver; `in_cluster` gives one
    that is a driver alone, in a cluster that is up already.
    """

    def __init__(self, config: Path, driver: str = "hpc_grpo.driver.main") -> None:
        command = [sys.executable, "-m", "hpc_grpo.cli", "train", str(config), "--driver", driver]
        self._start(config, command, environment=None)

    @classmethod
    def in_cluster(cls, environment: Mapping[str, str], config: Path, driver: str = "hpc_grpo.driver.main") -> Attempt:
        attempt = cls.__new__(cls)
        run = freeze(load_config(str(config)), [], [])
        words = [driver] if driver.endswith(".py") else ["-m", driver]
        number = max((line["attempt"] for line in read_jsonl(run.ledger)), default=0) + 1
        attempt._start(
            config,
            [sys.executable, *words, str(run.path)],
            {**environment, "HPC_GRPO_ATTEMPT": str(number), "HPC_GRPO_ATTEMPT_DIR": str(run.attempt(number, "test"))},
        )
        attempt.number = number
        return attempt

    def _start(self, config: Path, command: list[str], environment: dict[str, str] | None) -> None:
        run = yaml.safe_load(config.read_text())["run"]
        self.run_dir = RunDir(Path(run["root"]) / run["name"])
        self.number = self.run_dir.next_attempt_number()
        self._log = config.with_suffix(f".{time.time_ns()}.log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=config.parent,
                env=environment,
            )

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(2):  # the second asks a supervisor to tear down at once
            if self.process.poll() is None:
                self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its children notice
            self.process.wait()

    @property
    def text(self) -> str:
        """What the supervisor and, through it, the driver printed."""
        return self._log.read_text(errors="replace")

    def wait(self, deadline_s: float = RUN_DEADLINE_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline_s:.0f} s:\n{self.text}") from None

    def wait_to_end(self) -> RunDir:
        """Wait for COMPLETE."""
        code = self.wait()
        assert code == 0, self.text
        assert self.run_dir.is_complete(), self.text
        return self.run_dir

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float = RUN_DEADLINE_S) -> None:
        ends_at = time.monotonic() + deadline_s
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode} before {what}:\n{self.text}")
            if time.monotonic() > ends_at:
                raise AssertionError(f"no {what} within {deadline_s:.0f} s:\n{self.text}")
            time.sleep(_POLL_S)

    def wait_for_step(self, step: int) -> None:
        """Until a step of this number, or a later one, has been recorded by this attempt."""

        def recorded() -> bool:
            lines = [line for line in read_jsonl(self.run_dir.ledger) if line["attempt"] == self.number]
            return any(line["step"] >= step for line in lines)

        self.wait_until(recorded, f"step {step}")

    def record(self) -> dict[str, Any]:
        """The attempt.json that the supervisor wrote."""
        (folder,) = self.run_dir.attempts.glob(f"{self.number}-*")
        values: dict[str, Any] = json.loads((folder / "attempt.json").read_text())
        return values


def engine_report(program: str, config: Path, *words: str) -> dict[str, Any]:
    """Run a program beside this file in the environment of an engine; return the JSON object on its last line."""
    run = subprocess.run(
        [sys.executable, "-m", f"{__package__}.{program}", str(config), *words],
        cwd=HERE.parents[1],
        env={**os.environ, **engine_environment(load_config(str(config)), on_gpu=False)},
        capture_output=True,
        text=True,
        timeout=ENGINE_DEADLINE_S,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    report: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return report


def run_to_end(config: Path) -> Attempt:
    """Run `config` to COMPLETE, Ray and all."""
    with Attempt(config) as attempt:
        attempt.wait_to_end()
    return attempt


def complete_in_cluster(environment: Mapping[str, str], config: Path) -> RunDir:
    """Run `config` to COMPLETE in a cluster that is up."""
    with Attempt.in_cluster(environment, config) as attempt:
        return attempt.wait_to_end()


def metrics_of(run_dir: RunDir) -> dict[int, dict[str, Any]]:
    """The surviving metrics of each training step, without the eval before the first."""
    return {step: values for step, values in read_metrics(run_dir.metrics).items() if step > 0}


def exported_weights(run_dir: RunDir) -> dict[str, Any]:
    """Name -> numpy array of the newest export, in float32, which holds every bfloat16."""
    from safetensors.torch import load_file

    folder = run_dir.latest_export()
    assert folder is not None
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.float().numpy() for file in files for name, tensor in load_file(file).items()}


def differing_weights(one: RunDir, other: RunDir) -> list[str]:
    """Names of the exported parameters that are not bit for bit the same."""
    left, right = exported_weights(one), exported_weights(other)
    assert left.keys() == right.keys()
    return [name for name in left if not np.array_equal(left[name], right[name])]
