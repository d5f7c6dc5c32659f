"""Our verdicts beside those of public graders; `public_graders/differences.json` explains each difference.

`cases.jsonl` has inputs and their verdicts: math-verify's and IFEval's from their own test cases; slime's
(`rollout/rm_hub`) and MMLU-Pro's extractor's by running them on their test cases and on completions of ours. Run with
`-s` to see the table.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import RewardConfig
from hpc_grpo.grading.pool import RewardPool

FOLDER = Path(__file__).parent / "public_graders"
DOCS = Path(__file__).parents[3] / "docs" / "rewards.md"
CASES: list[dict[str, Any]] = [json.loads(line) for line in (FOLDER / "cases.jsonl").read_text().splitlines()]
REASONS: dict[str, list[int]] = json.loads((FOLDER / "differences.json").read_text(encoding="utf-8"))
"""For each reason the numbers of its cases, which are lines of cases.jsonl."""


def ours() -> Iterator[float]:
    """Score each case through a worker, all settings but the deadlines at their defaults."""
    pools = {
        name: RewardPool([RewardConfig(name=name, timeout_s=120.0, args={"completion_s": 60.0})], num_workers=1)
        for name in sorted({case["reward"] for case in CASES})
    }
    futures = [pools[case["reward"]].submit("q", [case["completion"]], case["row"]) for case in CASES]
    for future in futures:
        outcome = future.result()
        assert outcome.errors == ()
        yield outcome.rewards[0]
    for pool in pools.values():
        with closing(pool):
            pass


def test_verdicts_differ_from_public_graders_where_a_reason_is_written_and_nowhere_else() -> None:
    differing = {
        number: (score, case)
        for number, (score, case) in enumerate(zip(ours(), CASES, strict=True), 1)
        if score != pytest.approx(case["verdict"], abs=1e-6)
    }
    explained = sorted(number for numbers in REASONS.values() for number in numbers)
    assert {number: differing[number] for number in differing if number not in explained} == {}
    assert [number for number in explained if number not in differing] == []


def table() -> str:
    """Return a row for each reason, with an example, and the number of cases of each grader."""
    rows = ["| grader | theirs, ours | cases | example: reference, completion | why |", "|---|---|---|---|---|"]
    for reason, numbers in REASONS.items():
        case = min((CASES[number - 1] for number in numbers), key=lambda case: len(case["completion"]))
        graders = ", ".join(dict.fromkeys(CASES[number - 1]["grader"] for number in numbers))
        verdicts = "1, 0" if case["verdict"] else "0, 0.5" if case["reward"] == "string_f1" else "0, 1"
        example = f"`{case['row']['answer']}`, `{case['completion']}`".replace("\n", " ").replace("|", "\\|")
        rows.append(f"| {graders} | {verdicts} | {len(numbers)} | {example} | {reason} |")
    counted = Counter(case["grader"] for case in CASES)
    total = ", ".join(f"{grader} {count}" for grader, count in sorted(counted.items()))
    differences = sum(map(len, REASONS.values()))
    return "\n".join([*rows, "", f"{len(CASES)} cases ({total}), {differences} differences."])


def test_the_table_of_differences_in_the_docs_is_up_to_date() -> None:
    print(f"\n{table()}")
    assert table().split("\n\n")[0] in DOCS.read_text(encoding="utf-8")
    assert " ".join(table().split()) in " ".join(DOCS.read_text(encoding="utf-8").split())
