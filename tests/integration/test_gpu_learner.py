"""The cases of benchmarks/gpu_learner.py, which runs where nobody watches: each kind once, at a toy size on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.learner_processes import run_ranks

pytestmark = pytest.mark.integration

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def measure_toy(rank: int, world_size: int, store: Any, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Measure one toy case as its own process would; say too whether Ray or vLLM was imported for it."""
    sys.path.insert(0, str(BENCHMARKS))
    import gpu_learner
    from gpu_learner_case import measure
    from gpu_learner_inputs import SHAPES, Case

    case = gpu_learner.toy(Case("a case", "0.5B", **changes))
    result = measure(case, folder)
    result["weight_bytes"] = 2 * SHAPES["toy"].num_parameters
    return {**result, "row": gpu_learner.row(case, result), "imported": {"ray", "vllm"} & set(sys.modules)}


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_the_learners_step_is_measured_without_ray(zero_stage: int, tmp_path: Path) -> None:
    (result,) = run_ranks(1, measure_toy, tmp_path, {"zero_stage": zero_stage, "lengths": "ragged"})
    assert result["imported"] == set()
    assert len(result["step_s"]) == 3
    step_s = sorted(result["step_s"])[1]
    assert result["flops_per_s"] > 6 * 20_000 * result["tokens_per_s"], "layers of 25,000 parameters, and a head"
    assert result["planned_parts"]["optimizer (float32 weights, moments)"] % 12 == 0
    assert f"{step_s:.3f} s" in result["row"]


def test_copies_to_and_from_the_store_are_measured(tmp_path: Path) -> None:
    (result,) = run_ranks(1, measure_toy, tmp_path, {"measures": "copies"})
    assert result["num_bytes"] == result["weight_bytes"]
    assert result["pageable to store"] > 0.0 < result["pageable to device"]
    assert "GB/s: pageable to store" in result["row"]
