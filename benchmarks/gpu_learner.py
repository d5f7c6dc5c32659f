"""The learner on one GPU: tokens/s, model FLOP/s, peak memory beside `plan`'s figure, and copies to and from the store.

`python benchmarks/gpu_learner.py --out DIR [--budget-s 480]` needs torch, transformers and DeepSpeed alone: no Ray, no
vLLM, no network. Weights are random. Cases run in order of worth, each in a process of its own; one is begun only while
the budget lasts. Every line is printed as it comes, and is in DIR/results.jsonl with all its numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import run_script
from gpu_learner_inputs import Case

PEAK_FLOPS_PER_S = 989e12
"""Dense bfloat16 of an H100 SXM, an H200 and a GH200 alike."""
_BEGUN_WITH_S = 20.0
"""The least that is left of the budget when a case begins."""
_CASE_S = 90.0
"""A case that takes longer is stopped: it shall not cost the others."""
_LEARNERS_OWN = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""What a run gives its learners on GPUs (driver/actors.py)."""

CASES = (
    Case("0.5B ZeRO-1", "0.5B"),
    Case("1.5B ZeRO-1", "1.5B"),
    Case("copies of 0.5B", "0.5B", measures="copies"),
    Case("0.5B no checkpointing", "0.5B", is_checkpointed=False),
    Case("0.5B ragged, sdpa", "0.5B", lengths="ragged"),
    Case("0.5B ragged, cuDNN", "0.5B", lengths="ragged", uses_cudnn=True),
    Case("0.5B ragged, shared", "0.5B", lengths="ragged", shares_prompts=True),
    Case("0.5B ragged, varlen", "0.5B", lengths="ragged", attention="varlen"),
    Case("0.5B ragged, padded", "0.5B", lengths="padded"),
    Case("0.5B head as model", "0.5B", head_dtype="model"),
    Case("1.5B ZeRO-2", "1.5B", zero_stage=2),
    Case("1.5B ZeRO-3", "1.5B", zero_stage=3),
    Case("1.5B no checkpointing", "1.5B", is_checkpointed=False, tokens_per_microbatch=8192),
    Case("1.5B ragged, varlen", "1.5B", lengths="ragged", attention="varlen"),
    Case("1.5B ragged, sdpa", "1.5B", lengths="ragged"),
    Case("0.5B ZeRO-2", "0.5B", zero_stage=2),
    Case("0.5B ZeRO-3", "0.5B", zero_stage=3),
    Case("0.5B equal, varlen", "0.5B", attention="varlen"),
)
"""In order of worth."""


def run_cases(cases: Sequence[Case], folder: Path, ends_at: float) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yield each case with its result, or with what it failed of; ends with the budget."""
    for case in cases:
        left_s = ends_at - time.monotonic()
        if left_s < _BEGUN_WITH_S:
            yield case, {"error": "not begun: the budget is spent"}
        else:
            yield case, _measured(case, folder, min(left_s, _CASE_S))


def _measured(case: Case, folder: Path, timeout_s: float) -> dict[str, Any]:
    """Measure a case in a process of its own; of one that fails, tell the last line and the end of what it wrote."""
    try:
        return run_script("gpu_learner_case.py", [json.dumps(asdict(case)), str(folder)], _LEARNERS_OWN, timeout_s)
    except RuntimeError as error:
        return {"error": str(error).strip().splitlines()[-1], "stderr": str(error)}
    except TimeoutExpired as error:
        return {"error": f"stopped after {error.timeout:.0f} s", "stderr": str(error.stderr or "")[-3000:]}


def row(case: Case, result: dict[str, Any]) -> str:
    """Put a result on one line."""
    if "error" in result:
        return f"{case.name:<24}{result['error']}"
    if case.measures == "copies":
        rates = ", ".join(f"{key} {value:.1f}" for key, value in result.items() if " to " in key)
        return f"{case.name:<24}{result['num_bytes'] / 2**30:.2f} GiB, GB/s: {rates}"
    memory = "-"
    if "peak_reserved_bytes" in result:
        used = result["peak_reserved_bytes"] + result["beside_allocator_bytes"]
        memory = f"{used / 2**30:.1f} GiB, planned {result['planned_bytes'] / 2**30:.1f}"
    share = result["flops_per_s"] / PEAK_FLOPS_PER_S
    step_s = statistics.median(result["step_s"])
    return f"{case.name:<24}{step_s:>8.3f} s {result['tokens_per_s']:>10,.0f} tok/s {share:>7.1%} MFU  {memory}"


def toy(case: Case) -> Case:
    """Return the case at a size that a CPU takes in a second; torch's kernel for packed documents needs a GPU."""
    return replace(case, size="toy", num_sequences=8, longest=32, tokens_per_microbatch=128, least_s=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-learner"))
    parser.add_argument("--budget-s", type=float, default=480.0)
    parser.add_argument("--toy", action="store_true", help="A model of a few thousand parameters, to see it work.")
    options = parser.parse_args()
    cases = [toy(case) for case in CASES if case.attention != "varlen"] if options.toy else CASES
    ends_at = time.monotonic() + options.budget_s
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, (options.out / "results.jsonl").open("w") as results:
        for case, result in run_cases(cases, Path(folder), ends_at):
            results.write(json.dumps({**asdict(case), **result}) + "\n")
            results.flush()
            print(row(case, result), flush=True)


if __name__ == "__main__":
    main()
