from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config.train import CallbackConfig
from hpc_grpo.driver.callback import StepCallback

FILE = Path(__file__).resolve().parents[3] / "examples" / "early_stopping.py"


@pytest.mark.parametrize(
    ("args", "solved", "ends_after", "best"),
    [
        ({"patience": 2}, [0.1, 0.2, 0.2, 0.15, 0.9], 3, 0.2),  # the fourth eval is the second without a gain
        ({"patience": 2}, [0.1, 0.2, 0.2, 0.3, 0.2, 0.4], None, 0.0),
        ({"patience": 2, "min_gain": 0.1}, [0.1, 0.15, 0.18, 0.9], 2, 0.1),
        ({"patience": 1, "metric": "eval/reward_mean"}, [0.1, 0.2], None, 0.0),
    ],
)
def test_the_example_of_a_callback_ends_a_run_after_evals_without_a_gain(
    args: dict[str, Any], solved: list[float], ends_after: int | None, best: float
) -> None:
    callback = StepCallback(CallbackConfig(name=f"{FILE}:no_gain", args=args), 60.0)
    for step, share in enumerate(solved):
        said = callback.ask(step, {"eval/pass@1": share, "eval/reward_mean": float(step)})
        assert bool(callback.end_reason) == (step == ends_after), said
        if callback.end_reason:
            assert said == f"eval/pass@1 has not risen above {best:.3f} in 2 evals."
            break


def test_the_example_has_fewer_than_thirty_lines() -> None:
    assert len(FILE.read_text().splitlines()) < 30
