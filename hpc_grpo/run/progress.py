"""state.json: the last finished step in a few numbers, published atomically by the driver."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Literal

from hpc_grpo.run.paths import RunDir, write_json_atomic
from hpc_grpo.run.space import when_there_is_space

Phase = Literal["starting", "training", "stopped", "complete"]


@dataclass(frozen=True)
class RunState:
    """`reward`, `tokens_per_s` and `eta_s` are None until a step has ended; times are Unix seconds.

    `step_p95_s`, `eval_p95_s` and `save_p95_s` are the 95th percentiles of what a step, without what follows, an eval
    and a checkpoint take (see pace.py).
    """

    step: int
    total_steps: int
    attempt: int
    phase: Phase
    reward: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    step_p95_s: float | None = None
    eval_p95_s: float | None = None
    save_p95_s: float | None = None
    heartbeat: float = field(default_factory=time.time)


def write_state(run_dir: RunDir, state: RunState) -> None:
    when_there_is_space(lambda: write_json_atomic(run_dir.state, asdict(state)), "state.json")


def read_state(run_dir: RunDir) -> RunState | None:
    """The last published state; None before the driver's first."""
    if not run_dir.state.exists():
        return None
    return RunState(**json.loads(run_dir.state.read_text()))
