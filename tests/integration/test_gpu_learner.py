"""The cases of benchmarks/gpu_learner.py, which runs where nobody watches: each kind once, at a toy size on the CPU."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
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


def score_both_ways(rank: int, world_size: int, store: Any, folder: Path) -> tuple[Any, Any]:
    """Score two completions with the learner's own attention, then through the kernel for packed documents."""
    sys.path.insert(0, str(BENCHMARKS))
    import gpu_learner
    import torch.nn.attention.varlen
    from gpu_learner_inputs import Case, make_config, random_sequences

    from hpc_grpo.learner import model
    from hpc_grpo.learner.learner import Learner
    from hpc_grpo.learner.packing import pack
    from tests.support.varlen import attend_by_documents

    torch.nn.attention.varlen.varlen_attn = attend_by_documents
    model.require_varlen_attention = lambda: None
    case = gpu_learner.toy(Case("a case", "0.5B"))
    batch = pack(random_sequences(case, [12, 30]))
    own, packed = (
        model.score(Learner(make_config(replace(case, attention=kernel), folder)).model, batch).numpy()
        for kernel in ("sdpa", "varlen")
    )
    return own, packed


def test_the_kernel_for_packed_documents_gets_what_it_asks_for(tmp_path: Path) -> None:
    ((own, packed),) = run_ranks(1, score_both_ways, tmp_path)
    assert len(own) == (12 - 8) + (30 - 8)
    assert packed == pytest.approx(own, abs=0.02), "bfloat16, summed in another order"


@pytest.mark.parametrize(("zero_stage", "shares_prompts"), [(1, True), (3, False)])
def test_the_learners_step_is_measured_without_ray(zero_stage: int, shares_prompts: bool, tmp_path: Path) -> None:
    changes = {"zero_stage": zero_stage, "lengths": "ragged", "shares_prompts": shares_prompts}
    (result,) = run_ranks(1, measure_toy, tmp_path, changes)
    assert result["imported"] == set()
    assert len(result["step_s"]) == 3
    step_s = sorted(result["step_s"])[1]
    assert result["flops_per_s"] > 6 * 20_000 * result["tokens_per_s"], "layers of 25,000 parameters, and a head"
    assert result["planned_parts"]["optimizer (float32 weights, moments)"] % 12 == 0
    assert f"{step_s:.3f} s" in result["row"]


def test_the_configuration_of_every_case_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_learner
    from gpu_learner_inputs import make_config

    for case in gpu_learner.CASES:
        assert make_config(gpu_learner.toy(case), tmp_path).train.attention == case.attention


def test_lengths_with_a_tail_are_other_ones_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_learner_inputs import Case, sequence_lengths

    ragged = Case("a case", "0.5B", lengths="ragged")
    first, second = (sequence_lengths(ragged, step) for step in (1, 2))
    assert first == sequence_lengths(ragged, 1) != second


def test_copies_to_and_from_the_store_are_measured(tmp_path: Path) -> None:
    (result,) = run_ranks(1, measure_toy, tmp_path, {"measures": "copies"})
    assert result["num_bytes"] == result["weight_bytes"]
    assert result["pageable to store"] > 0.0 < result["pageable to device"]
    assert "GB/s: pageable to store" in result["row"]


def test_a_case_that_fails_or_is_not_begun_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_learner
    from gpu_learner_inputs import Case

    def run_script(script: str, arguments: list[str], env: dict[str, str], timeout_s: float) -> dict[str, Any]:
        if "broken" in arguments[0]:
            raise RuntimeError("gpu_learner_case.py failed:\nTraceback\nOutOfMemoryError: CUDA out of memory")
        raise gpu_learner.TimeoutExpired("python", timeout_s)

    monkeypatch.setattr(gpu_learner, "run_script", run_script)
    cases = [Case("broken", "toy"), Case("slow", "toy")]
    rows = [gpu_learner.row(*one) for one in gpu_learner.run_cases(cases, tmp_path, time.monotonic() + 1000)]
    assert rows[0].split(maxsplit=1) == ["broken", "OutOfMemoryError: CUDA out of memory"]
    assert rows[1].split(maxsplit=1) == ["slow", "stopped after 90 s"]
    ((_, late),) = gpu_learner.run_cases(cases[:1], tmp_path, time.monotonic() + 10)
    assert late == {"error": "not begun: the budget is spent"}
