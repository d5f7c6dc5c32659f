"""What one key of another system means beside others: steps of batches and of optimizers, norms, weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hpc_grpo.config.foreign import areal, open_instruct, trl, verl
from hpc_grpo.config.foreign.table import Kind, Row, translate

_ACTOR = "actor_rollout_ref.actor"
_VERL = {"data.train_batch_size": 1024, f"{_ACTOR}.ppo_mini_batch_size": 256}
_TRL = {"per_device_train_batch_size": 8, "num_generations": 8, "generation_batch_size": 32}
_OPEN_INSTRUCT = {"num_mini_batches": 2, "total_episodes": 6400, "warmup_ratio": 0.1}


def ours(rows: Sequence[Row], given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for outcome in translate(rows, given).outcomes for key, value in outcome.ours.items()}


@pytest.mark.parametrize(
    ("rows", "given", "key", "expected"),
    [
        (verl.ROWS, {**_VERL, f"{_ACTOR}.optim.lr_warmup_steps": 10}, "train.warmup_steps", 40),
        (
            verl.ROWS,
            {**_VERL, f"{_ACTOR}.optim.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": 50},
            "train.warmup_steps",
            20,
        ),
        (open_instruct.ROWS, _OPEN_INSTRUCT, "train.warmup_steps", 20),
        (
            areal.ROWS,
            {
                "total_train_steps": 100,
                "actor.ppo_n_minibatches": 4,
                "actor.optimizer.warmup_steps_proportion": 0.1,
            },
            "train.warmup_steps",
            40,
        ),
        (verl.ROWS, {f"{_ACTOR}.use_dynamic_bsz": True}, "train.max_tokens_per_microbatch", 16384),
        (verl.ROWS, {f"{_ACTOR}.ppo_micro_batch_size": 32}, "train.max_tokens_per_microbatch", 4 * 1024),
        (verl.ROWS, {f"{_ACTOR}.ppo_micro_batch_size_per_gpu": 2}, "train.max_tokens_per_microbatch", 2 * 1024),
        (areal.ROWS, {"actor.mb_spec.max_tokens_per_mb": None}, "train.max_tokens_per_microbatch", 1024 + 16384),
        (trl.ROWS, {**_TRL, "max_steps": 100}, "train.total_steps", 25),
        (trl.ROWS, {**_TRL, "max_steps": 100, "warmup_ratio": 0.1}, "train.warmup_steps", 10),
        (trl.ROWS, {**_TRL, "max_steps": 100, "save_steps": 20}, "checkpoint.every_steps", 5),
        (trl.ROWS, {**_TRL, "dataset_name": "x", "eval_strategy": "steps", "eval_steps": 8}, "eval.every_steps", 2),
        (trl.ROWS, {**_TRL, "sync_ref_model": True, "ref_model_sync_steps": 64}, "loss.ref_refresh_steps", 16),
    ],
)
def test_steps_and_sequences_are_counted_in_what_our_key_counts(
    rows: Sequence[Row], given: dict[str, Any], key: str, expected: int
) -> None:
    assert ours(rows, given)[key] == expected


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ({"adv_norm.mean_level": "group", "adv_norm.std_level": None}, ("group", False)),
        ({"adv_norm.mean_level": "group", "adv_norm.std_level": None, "adv_norm.mean_leave1out": True}, ("rloo", None)),
        ({"adv_norm.mean_level": "group"}, ("reinforce_pp_baseline", None)),
        ({"reward_norm.mean_level": "group", "reward_norm.std_level": "group"}, ("group", True)),
        ({"adv_norm.mean_level": "batch", "adv_norm.std_level": "batch"}, ("reinforce_pp", None)),
    ],
)
def test_areals_norms_choose_the_advantage(norms: dict[str, Any], expected: tuple[str, bool | None]) -> None:
    found = ours(areal.ROWS, {f"actor.{key}": value for key, value in norms.items()})
    assert (found["loss.advantage"], found.get("loss.normalize_std")) == expected


@pytest.mark.parametrize(
    ("given", "weighs"),
    [
        ({"actor.kl_ctl": 0.0}, False),
        ({}, True),  # with the KL that is AReaL's default
        ({"actor.kl_ctl": 0.0, "actor.adv_norm.mean_level": "group", "actor.adv_norm.std_level": None}, True),
    ],
)
def test_areals_scale_of_rewards_is_kept_where_it_reaches_the_gradient(given: dict[str, Any], weighs: bool) -> None:
    found = ours(areal.ROWS, {"actor.reward_scaling": 10.0, **given}).get("rewards")
    assert found == ([{"name": "correctness", "weight": 10.0}] if weighs else None)


@pytest.mark.parametrize(
    ("given", "name", "correction", "cap"),
    [
        ({}, "grpo", "none", None),
        ({"use_decoupled_loss": True}, "decoupled_ppo", "icepop", 5.0),
        ({"use_decoupled_loss": True, "behave_imp_weight_cap": 2.0}, "decoupled_ppo", "icepop", 2.0),
        ({"use_decoupled_loss": True, "behave_imp_weight_mode": "disabled"}, "grpo", "none", None),
        ({"use_decoupled_loss": True, "importance_sampling_level": "sequence"}, "gspo", "icepop", 5.0),
    ],
)
def test_areals_weight_from_the_engine_is_that_of_its_switches(
    given: dict[str, Any], name: str, correction: str, cap: float | None
) -> None:
    found = ours(areal.ROWS, {f"actor.{key}": value for key, value in given.items()})
    assert found["loss.name"] == name
    assert found["loss.importance_correction"] == correction
    assert found.get("loss.importance_cap") == cap


@pytest.mark.parametrize(
    ("rows", "given"),
    [
        (trl.ROWS, {"max_steps": "many"}),
        (verl.ROWS, {"data.train_batch_size": "large"}),
        (areal.ROWS, {"actor.backend": ["fsdp"]}),
    ],
)
def test_a_value_that_cannot_be_read_is_refused(rows: Sequence[Row], given: dict[str, Any]) -> None:
    assert any("cannot be read" in outcome.note for outcome in translate(rows, given).of(Kind.REFUSED))


def test_areals_group_of_one_is_refused() -> None:
    assert "gconfig.n_samples" in {outcome.theirs for outcome in translate(areal.ROWS, {}).of(Kind.REFUSED)}


@pytest.mark.parametrize(("loss_type", "denominator"), [("dapo", "tokens"), ("grpo", "sequences")])
def test_trls_ratio_of_a_sequence_keeps_the_denominator_of_its_loss(loss_type: str, denominator: str) -> None:
    found = ours(trl.ROWS, {"importance_sampling_level": "sequence", "loss_type": loss_type})
    assert (found["loss.name"], found["loss.denominator"]) == ("gspo", denominator)


def test_what_changes_sampling_or_the_schedule_is_told() -> None:
    translation = translate(trl.ROWS, {"top_k": 50, "lr_scheduler_kwargs.min_lr_rate": 0.1})
    kinds = {outcome.theirs: outcome.kind for outcome in translation.outcomes}
    assert kinds["top_k"] is Kind.REFUSED
    assert kinds["lr_scheduler_kwargs.min_lr_rate"] is Kind.BY_HAND
    translation = translate(verl.ROWS, {f"{_ACTOR}.policy_loss.clip_cov_ratio": 0.0002})
    assert [outcome.theirs for outcome in translation.of(Kind.BY_HAND)] == [f"{_ACTOR}.policy_loss.clip_cov_ratio"]
