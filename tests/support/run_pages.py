"""Runs for the tests of the page, written by the project's own writers."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.metrics.sinks import JsonlSink
from hpc_grpo.run.files import write_atomic, write_json_atomic
from hpc_grpo.run.paths import RunDir
from tests.support.run_builder import RunBuilder
from tests.support.tiny_vision import colour_image

HOSTILE = "</script></pre><img src=x onerror=alert(1)><svg onload=alert(2)> {{ 7*7 }} \x1b[2J \u202egnp.exe"
EPISODE = "[8]<|im_end|>\n<|im_start|>user\nLower.<|im_end|>\n<|im_start|>assistant\n[6]<|im_end|>"
DOT = base64.b64encode(colour_image("red", (20, 10), "JPEG")).decode()
CONFIG = """
task: {name: grpo}
model: {path: models/tiny}
data: {train: {path: sums.jsonl}}
rewards: [{name: math}]
rollout: {prompts_per_step: 4, group_size: 2}
train: {lr: LR, total_steps: 20}
eval: {reward: null, solved_at: 1.0}
"""


def write_steps(run: RunDir, steps: range, attempt: int = 1, **more: float) -> None:
    times = {"time/step_s": 4.0, "time/train_s": 3.0, "time/eta_s": 99.0, "lag/mean": 1.0}
    times |= {"node/train_s/nid001": 2.5, "node/sample_s/nid002": 3.5}
    sink = JsonlSink(run.metrics)
    for step in steps:
        metrics = {"reward/mean": step / 100 + attempt / 1000, **times} if step else {}
        if step % 10 == 0:
            metrics |= {"eval/pass@1": 0.2 + step / 100, "eval/pass@1_low": 0.1, "eval/pass@1_high": 0.9}
        sink.write(StepRecord(step=step, total_steps=20, attempt=attempt, metrics={**metrics, **more}))
    sink.close()


def write_lines(path: Path, *lines: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def rollout(ordinal: int = 0, sample: int = 0, **changes: Any) -> dict[str, Any]:
    line = {"ordinal": ordinal, "source": "sums", "sample": sample, "prompt": f"What is {ordinal}+1?\n", "answer": "2"}
    more = {"completion": "It is 2.", "reward": 1.0, "rewards": {"math": 1.0}, "advantage": 0.5, "tokens": 7}
    return {**line, **more, **changes}


def finished_run(path: Path, lr: str = "1.0e-6") -> RunBuilder:
    """A run of 20 steps in two attempts, of which the first crashed at step 14 and lost the last four steps."""
    built = RunBuilder(path)
    write_atomic(built.run.config, CONFIG.replace("LR", lr))
    git = {"commit": "0123456789abcdef", "dirty": True}
    write_json_atomic(built.run.source, {"created_at": 1.7e9, "version": "0.1.0", "git": git})
    crashed = built.attempt(
        1, "crash", why="torch.OutOfMemoryError: CUDA out of memory", age_s=900, phases_s={"head": 4, "ray": 5}
    )
    built.log(crashed, "W&B run 0123abcd: https://wandb.ai/lab/hpc-grpo/runs/0123abcd\ntorch.OutOfMemoryError: CUDA\n")
    write_atomic(built.run.wandb_id, "0123abcd\n")
    built.attempt(2, "complete", age_s=600, first_step=10)
    built.chain("11", "12")
    write_steps(built.run, range(15))
    write_steps(built.run, range(11, 21), attempt=2)
    built.state(2, "complete", step=20)
    write_atomic(built.run.complete_marker, "")
    for step in (0, 10, 20):
        lines = [rollout(n, solved=n < step / 5, completion=f"{n} at {step}") for n in range(6)]
        write_lines(built.run.eval_rollouts(step), *lines)
    wrong = {"reward": 0.0, "rewards": {"math": 0.0}, "completion": "It is 3."}
    write_lines(
        built.run.rollouts(12),
        rollout(3),
        rollout(3, 1, **wrong),
        rollout(4, images=[DOT]),
        rollout(4, 1, completion=HOSTILE),
    )
    turns = [{"observation": "", "text": "[8]", "reward": 0.0}, {"observation": "Lower.", "text": "[6]", "reward": 1.0}]
    episode = {"completion": EPISODE, "turns": turns, "rewards": {"environment": 1.0}}
    write_lines(built.run.rollouts(20), rollout(5, **episode), rollout(5, 1, **wrong))
    return built
