"""Models beside the policy of real learners: PPO's critic, references that follow the policy, and a teacher.

All run in the same processes, of two learners and of one: starting them takes longer than what they do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from hpc_grpo.demo.model import write_model
from hpc_grpo.metrics.reductions import merge
from tests.integration.learner_models import DIGITS, REFRESHED, distil, train_all
from tests.integration.learner_processes import (
    make_sequences,
    run_ranks,
)
from tests.support.tiny_models import TINY

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model(root / "model", TINY, seed=0)
    return root


@pytest.fixture(scope="module")
def two(root: Path) -> list[dict[str, Any]]:
    return run_ranks(2, train_all, root)


@pytest.fixture(scope="module")
def one(root: Path, two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return run_ranks(1, train_all, root)


def test_a_critic_learns_the_returns_alike_on_any_split_and_resumes(
    one: list[dict[str, Any]], two: list[dict[str, Any]]
) -> None:
    expected = [merge([step]) for step in one[0]["critic"][1][0]]
    errors = [step["critic/squared_error"] for step in expected]
    assert errors[-1] < 0.5 * errors[0]
    assert expected[0]["critic/value"] == 0.0
    for ranks in (one, two):
        for stage in (1, 2, 3):
            merged = [merge(list(steps)) for steps in zip(*(rank["critic"][stage][0] for rank in ranks), strict=True)]
            for own, other in zip(merged, expected, strict=True):
                assert own == pytest.approx(other, rel=1e-3, abs=1e-5)
            for metrics, after, again, after_again, _ in (rank["critic"][stage] for rank in ranks):
                assert again == metrics[-1]
                assert all(np.array_equal(after[name], after_again[name]) for name in after)


def test_an_exported_critic_is_a_token_classifier_and_another_run_begins_with_its_values(
    root: Path, one: list[dict[str, Any]], two: list[dict[str, Any]]
) -> None:
    sequence = make_sequences(5)[0]
    before_trained = np.flatnonzero(sequence.loss_mask) - 1
    for ranks in (one, two):
        for stage in (1, 3):
            for values, begun_with in (rank["critic"][stage][4] for rank in ranks):
                assert values == begun_with
                assert np.ptp(values) > 0.0
            folder = root / f"export_{len(ranks)}_{stage}" / "critic"
            exported = AutoModelForTokenClassification.from_pretrained(folder).eval()
            with torch.no_grad():
                logits = exported(torch.tensor(sequence.token_ids)[None].long()).logits[0, :, 0]
            np.testing.assert_allclose(logits.numpy()[before_trained], values, atol=1e-5)


@pytest.mark.parametrize("name", REFRESHED)
def test_a_reference_follows_the_policy_and_resumes_bit_for_bit(
    name: str, one: list[dict[str, Any]], two: list[dict[str, Any]]
) -> None:
    _, dtype, mixup, every = REFRESHED[name]
    for rank in two:
        weights, references, restored, metrics_agree, after_again = rank["references"][name]
        average = references[0]
        for step, policy in enumerate(weights, start=1):
            if step % every == 0:
                average = {key: old + np.float32(mixup) * (policy[key] - old) for key, old in average.items()}
            for key, value in references[step].items():
                expected = torch.from_numpy(average[key]).to(getattr(torch, dtype)).float().numpy()
                # One place of bfloat16 where the average lies in the middle of two.
                np.testing.assert_allclose(value, expected, rtol=2**-7 if dtype == "bfloat16" else 1e-6, atol=1e-7)
                assert (value == expected).mean() > 0.99 or dtype == "float32"
        assert any(not np.array_equal(references[0][key], references[3][key]) for key in average)
        for key, value in restored.items():
            assert np.array_equal(value, references[2][key])
            assert np.array_equal(one[0]["references"][name][key], value)
            assert np.array_equal(after_again[key], references[3][key])
        assert metrics_agree


def test_a_frozen_reference_adds_nothing_to_a_checkpoint(one: list[dict[str, Any]]) -> None:
    assert not [file for file in one[0]["frozen"] if "reference" in file]


@pytest.fixture
def teacher(root: Path) -> Path:
    """Adds `base` and `teacher` to the folder: writing any digits, and counting upwards mostly."""
    random = np.random.default_rng(0)
    model = AutoModelForCausalLM.from_pretrained(root / "model")
    digits = random.choice(DIGITS, (20, 32, 16))
    steps = np.where(random.random(digits.shape) < 0.7, random.choice([1, 1, 2], digits.shape), digits)
    counted = DIGITS[(random.integers(0, 12, (20, 32, 1)) + steps.cumsum(-1)) % 12]
    for name, batches in (("base", digits), ("teacher", counted)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for batch in batches:
            tokens = torch.from_numpy(batch)
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        write_model(root / name, TINY, seed=0)
        model.save_pretrained(root / name)
    return root


@pytest.mark.long
def test_a_student_comes_nearer_to_its_teacher(teacher: Path) -> None:
    [(estimates, (before, after))] = run_ranks(1, distil, teacher)
    print(f"\nreverse KL a token: {before:.3f} before, {after:.3f} after 30 steps; estimates {estimates[::10]}")
    assert before > 0.3
    assert after < 0.4 * before
    assert estimates[0] == pytest.approx(before, rel=0.25)
