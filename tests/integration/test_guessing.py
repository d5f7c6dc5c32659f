"""A real engine that guesses tokens from what a sequence has said before: what it samples, and with which logprobs."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_grpo.demo.model import ModelSize, write_model
from tests.integration.guessing_engine import NUM_DRAWS
from tests.integration.mismatch import TOLERANCE
from tests.integration.training_runs import engine_report, tiny_config

pytestmark = [pytest.mark.integration, pytest.mark.long]

SIZE = ModelSize(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=96, max_tokens=256)
TEMPERATURE = "0.1"
"""At which the tiny model repeats itself, and many a guess is right."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What an engine says without guesses, and with four."""
    workspace = tmp_path_factory.mktemp("guessing")
    write_model(workspace / "model", SIZE, seed=0)
    config = tiny_config(
        workspace,
        "guessing",
        "model",
        data={"max_prompt_tokens": 48},
        rollout={"max_new_tokens": 64},
        engine={"vllm": {"max_num_seqs": 64}},
    )
    return {tokens: engine_report("guessing_engine", config, str(tokens), TEMPERATURE) for tokens in (0, 4)}


def test_greedy_completions_are_the_same_in_fewer_steps(reports: dict[int, dict[str, Any]]) -> None:
    assert reports[4]["greedy"] == reports[0]["greedy"]
    assert reports[4]["greedy_steps"] < reports[0]["greedy_steps"]
    assert reports[4]["steps"] < reports[0]["steps"], "over random ones, too"


def test_logprobs_are_those_of_the_model(reports: dict[int, dict[str, Any]]) -> None:
    assert max(report["logprob_difference"] for report in reports.values()) < TOLERANCE


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_samples_are_drawn_from_the_models_distribution(num_tokens: int, reports: dict[int, dict[str, Any]]) -> None:
    """Pearson's chi-square over the completions that are expected five times; seeds are fixed, and so is the outcome.

    It has a mean of as many as there are, and a variance of twice that: four of its deviations are one in 10,000.
    """
    report = reports[num_tokens]
    pairs = [(line[-1], own * NUM_DRAWS) for line, own in zip(report["draws"], report["expected"], strict=True)]
    cells = [(drawn, own) for drawn, own in pairs if own >= 5]
    assert len(cells) > 20
    chi_square = sum((drawn - own) ** 2 / own for drawn, own in cells)
    assert chi_square < len(cells) + 4 * (2 * len(cells)) ** 0.5
