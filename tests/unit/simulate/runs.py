"""Run directories with the lines of steps that took as long as a test says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.run.frozen_config import read_config, write_config
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import RunState, write_state
from tests.support.configs import minimal_config


def line(
    step: int,
    wait: float,
    train: float,
    publish: float = 0.0,
    between: float = 0.0,
    checkpoint: float = 0.0,
    tokens: float = 800.0,
    **others: float,
) -> dict[str, Any]:
    """A step's line of metrics.jsonl; seconds."""
    return {
        "step": step,
        "attempt": 1,
        "tokens/completion_total": tokens,
        "time/generate_wait_s": wait,
        "time/train_s": train,
        "time/publish_s": publish,
        "time/checkpoint_s": checkpoint,
        "time/step_s": wait + train + publish + between + checkpoint,
        **others,
    }


def write_run(
    folder: Path, lines: Sequence[dict[str, Any]], total_steps: int, **sections: Any
) -> tuple[RunDir, Config]:
    """A run of 2 prompts of 4 rollouts a step, with two engines on its node."""
    run = RunDir(folder / "run")
    run.create()
    sections["rollout"] = {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 400, **sections.get("rollout", {})}
    sections["engine"] = {"engines_per_node": 2, **sections.get("engine", {})}
    write_config(run, minimal_config(train={"total_steps": total_steps}, **sections))
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in lines))
    write_state(run, RunState(lines[-1]["step"], total_steps, 1, "training"))
    return run, read_config(run)
