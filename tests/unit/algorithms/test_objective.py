"""Loss, gradient and every metric of each variant against float64 references, however a step is cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from hpc_grpo.algorithms.corrections import Correction
from hpc_grpo.algorithms.losses import Loss, LossSettings
from hpc_grpo.algorithms.objective import policy_objective
from hpc_grpo.algorithms.terms import LossInputs
from hpc_grpo.config.resources import Budget
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.learner import MetricAccumulator
from hpc_grpo.learner.packing import pack
from hpc_grpo.learner.split import split_microbatches
from hpc_grpo.metrics.reductions import merge
from hpc_grpo.section import OWN, variants
from hpc_grpo.types import Minibatch, TrainSequence
from tests.support.configs import loss_of, minimal_config
from tests.unit.algorithms import references
from tests.unit.algorithms.references import Trained

LONGEST = 12
"""What `denominator: constant` counts for a sequence unless the config says otherwise."""


def ragged_groups(seed: int, deviation: float = 0.4) -> list[Trained]:
    """Three groups of up to five sequences of 1 to 12 tokens; learner, engine and reference differ by `deviation`."""
    random = np.random.default_rng(seed)
    sequences = []
    for _ in range(3):
        for _ in range(random.integers(2, 6)):
            n = int(random.integers(1, LONGEST + 1))
            proximal = -random.exponential(1.5, n)
            others = [proximal + random.normal(0.0, deviation, n) for _ in range(3)]
            # As the learner has them: what is compared below are equations, not the rounding of their inputs.
            learner, engine, reference = (each.astype(np.float32).astype(np.float64) for each in others)
            proximal = proximal.astype(np.float32).astype(np.float64)
            advantages = np.full(n, random.normal()).astype(np.float32).astype(np.float64)
            draws = pack([train_sequence(len(sequences), advantages, engine)]).draws.double().numpy()
            sequences.append(Trained(learner, proximal, engine, reference, advantages, draws))
    return sequences


def train_sequence(index: int, advantages: Any, engine: Any) -> TrainSequence:
    n = len(advantages)
    loss_mask = np.arange(n + 2) >= 2
    columns = [np.concatenate([np.zeros(2), own]).astype(np.float32) for own in (advantages, engine)]
    return TrainSequence(index, 0, np.zeros(n + 2, np.int32), loss_mask, *columns)


def step(
    sequences: Sequence[Trained],
    settings: LossSettings,
    num_ranks: int,
    budget: int,
    dtype: torch.dtype,
    counts: tuple[int, int] | None = None,
) -> tuple[float, list[Any], dict[str, float]]:
    """Compute a step as learners do: ranks of unequal shares, microbatches of `budget` tokens, one sum over all.

    `counts` are the tokens and sequences of the step where more than these are in its divisor.
    """
    num_tokens = sum(len(own.learner) for own in sequences)
    counted = counts or (num_tokens, len(sequences))
    minibatch = Minibatch((), *counted)
    objective, per_rank, loss = policy_objective(settings), [], 0.0
    whole = LossInputs(*(torch.from_numpy(np.concatenate([getattr(own, name) for own in sequences])).to(dtype)
                         for name in ("learner", "proximal", "engine", "reference", "advantages")),
                       torch.zeros(num_tokens, dtype=torch.int64),
                       draws=torch.from_numpy(np.concatenate([own.draws for own in sequences])).to(dtype))  # fmt: skip
    prepared = {name: prepare(whole) for name, prepare in objective.preparations.items()}
    gradients: list[Any] = [None] * len(sequences)
    for rank in range(num_ranks):
        own = [
            train_sequence(i, each.advantages, each.engine)
            for i, each in enumerate(sequences)
            if i % 5 % num_ranks == rank
        ]
        accumulator = MetricAccumulator()
        accumulator.left_out = objective.divisor(minibatch) - objective.divisor(
            Minibatch((), num_tokens, len(sequences))
        )
        for microbatch in split_microbatches(own, Budget(budget)):
            batch, rows = pack(microbatch), [sequences[each.ordinal] for each in microbatch]

            def column(name: str, rows: Sequence[Trained] = rows) -> torch.Tensor:
                return torch.from_numpy(np.concatenate([getattr(row, name) for row in rows])).to(dtype)

            live = column("learner").requires_grad_()
            reference = column("reference") if settings.kl.coef else None
            inputs = LossInputs(
                live, column("proximal"), batch.engine_logprobs.to(dtype), reference, batch.advantages.to(dtype),
                batch.sequence_ids, draws=batch.draws.to(dtype), of_minibatch=prepared,
            )  # fmt: skip
            output = objective.loss(inputs)
            weights = objective.token_weights(LONGEST, batch.sequence_ids, batch.mask.to(dtype))
            accumulator.add(batch.mask.to(dtype), output, weights)
            share = torch.dot(output.per_token, weights.of_tokens) / objective.divisor(minibatch)
            share.backward()
            loss += share.item()
            parts = live.grad.split([len(row.learner) for row in rows])
            for each, part in zip(microbatch, parts, strict=True):
                gradients[each.ordinal] = part.numpy()
        per_rank.append(accumulator.reductions())
    return loss, gradients, merge(per_rank)


VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "grpo, dual clip": {"name": "grpo", "args": {"dual_clip": 1.3}},
    "grpo over sequences": {"name": "grpo", "denominator": "sequences"},
    "dr_grpo": {"name": "dr_grpo"},
    "dr_grpo, 7 tokens": {"name": "dr_grpo", "denominator": 7},
    "bnpo": {"name": "bnpo"},
    "dapo": {"name": "dapo"},
    "gspo": {"name": "gspo"},
    "gspo, clip 0.2, dual": {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2, "args": {"dual_clip": 1.1}},
    "gspo_token": {"name": "gspo_token", "clip_low": 0.05, "clip_high": 0.1},
    "cispo": {"name": "cispo"},
    "cispo, clip 0.2": {"name": "cispo", "clip_low": 0.2, "clip_high": 0.28},
    "sapo": {"name": "sapo"},
    "decoupled_ppo": {"name": "decoupled_ppo", "correction": {"args": {"cap": 1.5}}},
    "no correction": {"correction": "none"},
    "truncated at 1.1": {"correction": {"name": "truncated", "args": {"cap": 1.1}}},
    "sequence": {"correction": "sequence"},
    "sequence_mask": {"correction": {"name": "sequence_mask", "args": {"low": 0.7, "cap": 1.5}}},
    "icepop": {"correction": {"name": "icepop", "args": {"low": 0.8, "cap": 1.2}}},
    "geometric": {"correction": {"name": "geometric", "args": {"low": 0.9, "cap": 1.1}}},
    "m2po": {"correction": "m2po"},
    "m2po, all masked": {"correction": {"name": "m2po", "args": {"cap": 1e-9}}},
    "kl_cov": {"name": "kl_cov", "args": {"fraction": 0.1}},
    "clip_cov": {"name": "clip_cov", "args": {"fraction": 0.1, "low": 0.2, "high": 2.0}},
    "clip_cov, more than there are": {"name": "clip_cov", "args": {"fraction": 1.0, "low": 0.2}},
    "clip_cov, none between": {"name": "clip_cov", "args": {"low": 90.0, "high": 91.0}},
    "k1": {"kl": {"coef": 0.1, "estimator": "k1"}},
    "k2": {"kl": {"coef": 0.1, "estimator": "k2"}},
    "k3": {"kl": {"coef": 0.1}},
    "unbiased": {"kl": {"coef": 0.1, "estimator": "unbiased"}},
    "k1 in the reward": {"kl": {"coef": 0.1, "estimator": "k1", "where": "reward"}},
    "k3 in the reward, gspo_token": {"name": "gspo_token", "kl": {"coef": 0.1, "where": "reward"}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_its_papers_equation_however_the_step_is_cut(variant: str) -> None:
    settings = loss_of(**VARIANTS[variant])
    sequences = references.with_step(ragged_groups(0), settings)
    losses = zip(*(references.token_losses(own.learner, own, settings) for own in sequences), strict=True)
    shares = references.shares(sequences, settings, LONGEST)
    expected_loss = sum(s * own.sum() for term in losses for s, own in zip(shares, term, strict=True))
    expected_gradients = references.gradients(sequences, settings, LONGEST)
    expected_metrics = references.metrics(sequences, settings, LONGEST)
    cuts = itertools.product((1, 3), (1, 30, 10_000))
    for (num_ranks, budget), dtype in zip(cuts, itertools.cycle((torch.float64, torch.float32))):
        loss, gradients, metrics = step(sequences, settings, num_ranks, budget, dtype)
        assert loss == pytest.approx(expected_loss, abs=1e-6)
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        assert metrics == pytest.approx(expected_metrics, rel=1e-6, abs=1e-6)


def names_of(union: Any) -> set[str]:
    return set(variants(get_args(union)[0])) - {OWN}


def test_every_built_in_loss_and_correction_is_compared_with_its_equation() -> None:
    configs = [loss_of(**changes) for changes in VARIANTS.values()]
    assert {config.name for config in configs} == names_of(Loss) == set(references.POLICY)
    assert {config.correction.name for config in configs} == names_of(Correction)


@pytest.mark.parametrize("name", sorted(references.POLICY))
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    nobody = {"args": {"low": 90.0, "high": 91.0}} if name == "clip_cov" else {}
    settings = loss_of(name=name, denominator="tokens", correction="none", **nobody)
    same = references.with_step(
        [Trained(*[own.proximal] * 4, own.advantages, own.draws) for own in ragged_groups(7)], settings
    )
    _, gradients, _ = step(same, settings, 1, 40, torch.float64)
    num_tokens = sum(len(own.learner) for own in same)
    for ours, own in zip(gradients, same, strict=True):
        np.testing.assert_allclose(ours, -own.advantages / num_tokens, rtol=1e-6)


@pytest.mark.parametrize("variant", [name for name, changes in VARIANTS.items() if "kl" not in changes])
def test_what_has_no_advantage_has_no_gradient_where_the_objective_says_so(variant: str) -> None:
    """A third of the sequences; the others' gradients are the same to the last bit without them."""
    settings = loss_of(**VARIANTS[variant])
    is_still_without = policy_objective(settings).is_still_without_advantage
    assert is_still_without == (not settings.compares_minibatch and not settings.correction.compares_minibatch)
    if not is_still_without:
        return
    sequences = [
        replace(own, advantages=0.0 * own.advantages) if index % 3 == 0 else own
        for index, own in enumerate(ragged_groups(11))
    ]
    moving = [own for own in sequences if own.advantages.any()]
    num_tokens = sum(len(own.learner) for own in sequences)
    whole, gradients, metrics = step(sequences, settings, 1, 10_000, torch.float64)
    saved, own_gradients, own_metrics = step(moving, settings, 1, 10_000, torch.float64, (num_tokens, len(sequences)))
    assert whole == pytest.approx(saved, rel=1e-12)
    assert own_metrics["loss/policy"] == pytest.approx(metrics["loss/policy"], rel=1e-12)
    expected = iter(own_gradients)
    for own, gradient in zip(sequences, gradients, strict=True):
        np.testing.assert_array_equal(gradient, next(expected) if own.advantages.any() else 0.0 * gradient)


@pytest.mark.parametrize("changes", [{"entropy_coef": 0.1}, {"name": "m:f"}, {"correction": "m:f"}, {"name": "kl_cov"}])
def test_what_may_move_the_weights_without_an_advantage_is_not_still(changes: dict[str, Any]) -> None:
    assert not loss_of(**changes).is_still_without_advantage


@pytest.mark.parametrize("key", ["name", "correction"])
def test_a_function_of_the_users_is_looked_for_before_the_first_step(key: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(inputs): return inputs\n")
    for name in ("gone.py:mine", "mine.py:mine"):
        keys = {"name": f"{tmp_path}/{name}", "args": {"strength": 1.0}}
        with pytest.raises(ConfigError, match=r"there is no file .*gone\.py|here: strength\. It does not take them"):
            policy_objective(loss_of(**(keys if key == "name" else {key: keys})))


def test_a_loss_around_a_built_in_one_is_not_still() -> None:
    assert policy_objective(loss_of()).is_still_without_advantage
    assert not policy_objective(loss_of(), lambda inputs: loss_of().term(inputs)).is_still_without_advantage


def test_a_microbatch_that_only_fills_up_the_count_adds_nothing() -> None:
    mask, ids = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    for denominator in ("tokens", "sequences", "constant"):
        weights = policy_objective(loss_of(denominator=denominator)).token_weights(8, ids, mask)
        assert (weights.of_tokens.tolist(), weights.units.item()) == ([0.0], 0.0)


def test_the_longest_completion_is_the_constant_unless_another_is_given() -> None:
    config = minimal_config(loss={"name": "dr_grpo"}, rollout={"max_new_tokens": 20})
    mask, ids = torch.ones(3), torch.tensor([0, 0, 1])
    for given, expected in (("constant", 1 / 20), (5, 1 / 5)):
        objective = policy_objective(config.loss.model_copy(update={"denominator": given}))
        weights = objective.token_weights(config.rollout.max_new_tokens, ids, mask)
        assert weights.of_tokens.tolist() == pytest.approx([expected] * 3)
        assert weights.units.item() == pytest.approx(2.0)
