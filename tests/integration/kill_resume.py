"""Killing the driver changes nothing: every ordinal is trained once, and in synchronous mode no bit differs.

`python -m tests.integration.kill_resume --kills 10 [--lag 1]` kills the driver with SIGKILL at random moments, starts
the run again each time, and prints the ledger's verdict; without lag also whether the exported weights equal those of
a run that nobody killed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from hpc_grpo.run.contract import DEFAULT_DRIVER
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from tests.integration.training_runs import (
    Attempt,
    exported_weights,
    metrics_of,
    run_to_end,
    tiny_config,
    write_workspace,
)

KILLED = 128 + 9


def kill_after_step(config: Path, step: int, then_s: float = 0.0, driver: str = DEFAULT_DRIVER) -> Attempt:
    """Start an attempt and kill its driver `then_s` after it has recorded `step`, so anywhere in the next one."""
    with Attempt(config, driver) as attempt:
        attempt.wait_for_step(step)
        time.sleep(then_s)
        attempt.kill_driver()
        code = attempt.wait()
    assert code == KILLED, f"exit code {code}:\n{attempt.text}"
    return attempt


def differing_weights(one: RunDir, other: RunDir) -> list[str]:
    """Names of the exported parameters that are not bit for bit the same."""
    left, right = exported_weights(one), exported_weights(other)
    assert left.keys() == right.keys()
    return [name for name in left if not np.array_equal(left[name], right[name])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        workspace = write_workspace(Path(folder))
        changes: dict[str, Any] = {
            "engine": {"engines_per_node": 2},
            "train": {"total_steps": 4 * options.kills + 4},
            "rollout": {"max_policy_lag": options.lag},
            "checkpoint": {"every": 3},
        }
        config = tiny_config(workspace, "killed", **changes)
        step = 0
        for number in range(1, options.kills + 1):
            step += rng.randint(1, 5)
            attempt = kill_after_step(config, min(step, 4 * options.kills), then_s=rng.uniform(0.0, 1.0))
            lines = check_ledger(attempt.run_dir)
            step = lines.steps
            print(f"kill {number} after step {step}: {lines}", flush=True)
        run_dir = run_to_end(config).run_dir
        verdict = check_ledger(run_dir)
        recorded = list(metrics_of(run_dir)) == list(range(1, 4 * options.kills + 5))
        print(f"complete: {verdict}; every step has its metrics: {recorded}", flush=True)
        if options.lag:
            return 0 if verdict.is_sound and recorded else 1
        differing = differing_weights(run_dir, run_to_end(tiny_config(workspace, "untouched", **changes)).run_dir)
        print(f"weights that differ from an uninterrupted run: {differing or 'none, bit for bit'}", flush=True)
        return 0 if verdict.is_sound and recorded and not differing else 1


if __name__ == "__main__":
    sys.exit(main())
