from __future__ import annotations

from pathlib import Path

from hpc_grpo.metrics.evals import EvalGroup, eval_metrics
from hpc_grpo.registry import EVAL_METRICS
from tests.support.configs import minimal_config

FILE = Path(__file__).resolve().parents[3] / "examples" / "majority_vote.py"
CONFIG = minimal_config(eval={"num_samples": 4, "metrics": [f"{FILE}:majority_vote"]})


def group(answer: str, *given: str) -> EvalGroup:
    solved = tuple(text == answer for text in given)
    rewards = tuple(map(float, solved))
    texts = tuple(f"It is \\boxed{{{text}}}." for text in given)
    return EvalGroup("What is 6*7?", "products", {"answer": answer}, texts, rewards, solved, (5,) * len(given))


def test_the_example_of_an_eval_metric_counts_what_most_completions_say() -> None:
    groups = [
        group("42", "42", "41", "42", "40"),  # most say the right answer
        group("42", "41", "42", "41", "40"),  # most say a wrong one
        group("42", "42", "41", "40", "39"),  # as often as any other, and first
    ]
    (name,) = CONFIG.eval.metrics
    metrics = eval_metrics(groups, CONFIG.eval, {name: EVAL_METRICS.find(name)})
    assert metrics["majority@4"] == 2 / 3
    assert metrics["pass@1"] == 4 / 12


def test_the_example_has_fewer_than_thirty_lines() -> None:
    assert len(FILE.read_text().splitlines()) < 30
