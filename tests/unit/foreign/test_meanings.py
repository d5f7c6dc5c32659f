"""What one key of another system means beside others: steps of batches and of optimizers, norms, weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hpc_grpo.foreign import areal, open_instruct, trl, verl
from hpc_grpo.foreign.systems import SYSTEMS
from hpc_grpo.foreign.table import NOT_GIVEN, ByHandError, Kind, Outcome, RefusedError, Row, Theirs, translate
from tests.unit.foreign.examples import AREAL, OPEN_INSTRUCT, TRL, VERL
from tests.unit.foreign.test_examples import keys_of

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_VERL = {"data.train_batch_size": 1024, f"{_ACTOR}.ppo_mini_batch_size": 256}
_TRL = {"per_device_train_batch_size": 8, "num_generations": 8, "generation_batch_size": 32}
_OPEN_INSTRUCT = {"num_mini_batches": 2, "total_episodes": 6400, "warmup_ratio": 0.1}


EXAMPLES = {"areal": AREAL, "verl": VERL, "open_instruct": OPEN_INSTRUCT, "trl": TRL}
SWITCHES: dict[str, list[dict[str, Any]]] = {
    "trl": [
        {"eval_strategy": "steps", "eval_steps": 10, "dataset_name": "d", "num_processes": 2, "vllm_mode": "server"},
        {"loss_type": "sapo", "max_steps": 10, "warmup_steps": 0.1, "sync_ref_model": True, "beta": 0.1,
         "use_peft": True},
    ],
    "verl": [
        {f"{_ACTOR}.policy_loss.loss_mode": loss, "algorithm.use_kl_in_reward": True, "algorithm.adv_estimator": "grpo",
         "algorithm.filter_groups.enable": True, "algorithm.rollout_correction.bypass_mode": loss == "sapo",
         "algorithm.rollout_correction.rollout_is": "token", f"{_ACTOR}.use_dynamic_bsz": True,
         f"{_ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
         "reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 10,
         "actor_rollout_ref.model.lora_rank": 8}
        for loss in ("vanilla", "sapo", "kl_cov", "clip_cov")
    ],
    "areal": [
        {"actor.use_sapo_loss": True},
        {"actor.use_decoupled_loss": True, "actor.rejection_sampling.level": "token", "ref.path": "m"},
        {"actor.overlong_reward_penalty": True, "valid_dataset.path": "d", "evaluator.freq_epochs": 1},
    ],
    "open_instruct": [{"apply_r1_style_format_reward": True, "ref_policy_update_freq": 10}],
}  # fmt: skip
"""Settings that make conversions read what no example makes them read."""


def only_outcome(rows: Sequence[Row], given: dict[str, Any], key: str) -> Outcome:
    (found,) = (outcome for outcome in translate(rows, given).outcomes if key in outcome.ours)
    return found


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
        (areal.ROWS, {"train_dataset.max_length": 1024}, "train.max_tokens_per_microbatch", 1024 + 16384),
        (trl.ROWS, {**_TRL, "max_steps": 100}, "train.total_steps", 25),
        (trl.ROWS, {**_TRL, "max_steps": 100, "warmup_ratio": 0.1}, "train.warmup_steps", 10),
        (trl.ROWS, {**_TRL, "max_steps": 100, "save_steps": 20}, "checkpoint.every", 5),
        (trl.ROWS, {**_TRL, "dataset_name": "x", "eval_strategy": "steps", "eval_steps": 8}, "eval.every", 2),
        (trl.ROWS, {**_TRL, "sync_ref_model": True, "ref_model_sync_steps": 64}, "loss.kl.refresh_steps", 16),
    ],
)
def test_steps_and_sequences_are_counted_in_what_our_key_counts(
    rows: Sequence[Row], given: dict[str, Any], key: str, expected: int
) -> None:
    assert ours(rows, given)[key] == expected


@pytest.mark.parametrize(
    ("norms", "expected", "is_told"),
    [
        ({"adv_norm.mean_level": "group", "adv_norm.std_level": None}, ("group", False), True),
        ({"reward_norm.mean_level": "group", "reward_norm.std_level": None, "reward_norm.mean_leave1out": True},
         ("rloo", None), False),
        ({"reward_norm.mean_level": "group"}, ("group_step_std", None), True),
        ({"reward_norm.mean_level": "group", "reward_norm.std_level": "group"}, ("group", True), False),
        ({"adv_norm.mean_level": "batch", "adv_norm.std_level": "batch"}, ("reinforce_pp", True), True),
    ],
)  # fmt: skip
def test_areals_norms_choose_the_advantage(
    norms: dict[str, Any], expected: tuple[str, bool | None], is_told: bool
) -> None:
    outcome = only_outcome(areal.ROWS, {f"actor.{key}": value for key, value in norms.items()}, "loss.advantage.name")
    found = outcome.ours
    assert (found["loss.advantage.name"], found.get("loss.advantage.normalize_std")) == expected
    assert (outcome.kind is Kind.DIFFERS) == is_told


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
    ("given", "expected"),
    [
        ({}, ("grpo", "engine", "none", None)),
        ({"recompute_logprob": True}, ("grpo", "recomputed", "none", None)),
        ({"use_decoupled_loss": True}, ("decoupled_ppo", "recomputed", "none", None)),
        ({"use_decoupled_loss": True, "rejection_sampling.metric": "ratio"}, ("decoupled_ppo", "recomputed", "icepop",
        5)),
        ({"use_decoupled_loss": True, "behav_imp_weight_cap": 2.0}, ("decoupled_ppo", "recomputed", "icepop", 2)),
        ({"use_decoupled_loss": True, "behave_imp_weight_mode": "disabled"},
         ("decoupled_ppo", "recomputed", "none", None)),
        ({"use_decoupled_loss": True, "prox_logp_method": "loglinear"}, ("decoupled_ppo", "interpolated", "none",
        None)),
        ({"use_sapo_loss": True}, ("sapo", "engine", "none", None)),
    ],
)  # fmt: skip
def test_areals_switches_choose_loss_proximal_logprobs_and_correction(
    given: dict[str, Any], expected: tuple[str, str, str, float | None]
) -> None:
    found = ours(areal.ROWS, {f"actor.{key}": value for key, value in given.items()})
    keys = ("loss.name", "loss.proximal", "loss.correction.name", "loss.correction.args.cap")
    assert tuple(found.get(key) for key in keys) == expected


@pytest.mark.parametrize(
    ("rows", "given", "key", "note"),
    [
        (trl.ROWS, {"mask_truncated_completions": True}, "rollout.mask_truncated",
         "counted in a group's mean and deviation there; left out of both here"),
        (trl.ROWS, {"mask_truncated_completions": False}, "rollout.mask_truncated", ""),
        (open_instruct.ROWS, {"mask_truncated_completions": True}, "rollout.mask_truncated", ""),
        (areal.ROWS, {"actor.use_decoupled_loss": True, "actor.prox_logp_method": "loglinear"}, "loss.proximal",
         "there, every minibatch interpolates, at the version before the step's start; here, from the second minibatch "
         "on, at the step's start"),
        (areal.ROWS, {"actor.use_decoupled_loss": True}, "loss.proximal", ""),
        (verl.ROWS, {f"{_ACTOR}.use_kl_loss": True}, "loss.kl.coef", "at most 10 for each token there, unbounded here"),
        (verl.ROWS, {f"{_ACTOR}.use_kl_loss": True, f"{_ACTOR}.kl_loss_type": "k1"}, "loss.kl.coef", ""),
    ],
)  # fmt: skip
def test_a_difference_is_told_where_there_is_one(
    rows: Sequence[Row], given: dict[str, Any], key: str, note: str
) -> None:
    outcome = only_outcome(rows, given, key)
    assert (outcome.note, outcome.kind) == (note, Kind.DIFFERS if note else Kind.TRANSLATED)


@pytest.mark.parametrize(
    ("scaling", "norm", "factor", "is_refused"),
    [
        (10.0, {"actor.adv_norm.mean_level": "group", "actor.adv_norm.std_level": None}, 1.0, True),
        (10.0, {"actor.adv_norm.mean_level": "group", "actor.adv_norm.std_level": None}, 0.1, False),
        (10.0, {"actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": "group"}, 1.0, False),
    ],
)
def test_areals_overlong_penalty_is_scaled_with_the_reward(
    scaling: float, norm: dict[str, Any], factor: float, is_refused: bool
) -> None:
    penalty = {
        "actor.overlong_reward_penalty": True,
        "actor.overlong_tokens": 8,
        "actor.overlong_penalty_factor": factor,
    }
    translation = translate(areal.ROWS, {"actor.kl_ctl": 0.0, "actor.reward_scaling": scaling, **norm, **penalty})
    refused = {outcome.theirs: outcome.note for outcome in translation.of(Kind.REFUSED)}
    said = "the penalty of an overlong completion is at most 1 here, 10.0 there"
    assert refused.get("actor.overlong_reward_penalty") == (said if is_refused else None)
    assert translation.ours["rollout.overlong_tokens"] == 8


@pytest.mark.parametrize(
    ("estimator", "key", "is_read"),
    [("grpo", "gamma", False), ("rloo", "gamma", False), ("reinforce_plus_plus", "gamma", True), ("grpo", "lam", False),
     ("reinforce_plus_plus", "lam", False)],
)  # fmt: skip
def test_verls_discount_is_refused_where_its_estimator_reads_it(estimator: str, key: str, is_read: bool) -> None:
    translation = translate(verl.ROWS, {"algorithm.adv_estimator": estimator, f"algorithm.{key}": 0.9})
    assert (f"algorithm.{key}" in {outcome.theirs for outcome in translation.of(Kind.REFUSED)}) == is_read


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 1.0),
        ({"grad_clip": 0.5}, 0.5),
        ({"optim.clip_grad": 0.2, "grad_clip": 0.5}, 0.2),
        ({"grad_clip": 0.5, "optim.clip_grad": 0.2}, 0.2),
        ({"optim.grad_clip": 0.1, "optim.clip_grad": 0.2, "grad_clip": 0.5}, 0.1),
    ],
)
def test_verls_gradient_clip_is_the_optimizers_before_the_older_one_of_the_actor(
    given: dict[str, float], expected: float
) -> None:
    assert (
        ours(verl.ROWS, {f"{_ACTOR}.{key}": value for key, value in given.items()})["train.max_grad_norm"] == expected
    )


@pytest.mark.parametrize(
    ("rows", "key"),
    [(verl.ROWS, "trainer.experiment_name"), (open_instruct.ROWS, "exp_name"), (open_instruct.ROWS, "run_name"),
     (trl.ROWS, "run_name"), (areal.ROWS, "experiment_name")],
)  # fmt: skip
def test_a_name_may_be_a_number(rows: Sequence[Row], key: str) -> None:
    assert ours(rows, {key: 20260801})["run.name"] == "20260801"


def test_areals_reference_may_be_another_model() -> None:
    given = {"actor.path": "m", "actor.kl_ctl": 0.1, "ref.path": "other"}
    assert ours(areal.ROWS, given)["loss.kl.reference"] == "other"
    assert "loss.kl.reference" not in ours(areal.ROWS, {**given, "ref.path": "m"})


@pytest.mark.parametrize(
    ("rows", "given", "key", "reason"),
    [
        (areal.ROWS, {"critic.path": "m"}, "critic.path", "a critic needs task: ppo"),
        (areal.ROWS, {"ppo.eps_clip": 0.2}, "critic", "a critic needs task: ppo"),
        (areal.ROWS, {"actor.mask_no_eos_with_zero": True}, "actor.mask_no_eos_with_zero", "trains with reward 0"),
        (areal.ROWS, {"actor.m2_threshold": 0.04}, "actor.m2_threshold", "masks per microbatch"),
        (areal.ROWS, {"actor.kl_ctl": 0.1}, "actor.kl_ctl", "rewards lose kl_ctl * log p"),
        (areal.ROWS, {"actor.use_decoupled_loss": True, "actor.rejection_sampling.level": "sequence"},
         "actor.use_decoupled_loss", "rejection_sampling by sequence, ratio, mask is not supported"),
        (verl.ROWS, {"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}, "actor_rollout_ref.actor.loss_agg_mode",
         "verl up to 0.8 always by sequences"),
        (verl.ROWS, {}, "algorithm.adv_estimator", "PPO's critic needs task: ppo"),
        (trl.ROWS, {"loss_type": "cispo"}, "loss_type", "less than 1 would scale all tokens down"),
        (trl.ROWS, {"delta": 1.1}, "delta", "delta = 1.1 is less"),
        (trl.ROWS, {"loss_type": "luspo"}, "loss_type", "luspo needs importance_sampling_level: sequence"),
        (open_instruct.ROWS, {"non_stop_penalty": True}, "non_stop_penalty", "gets non_stop_penalty_value there"),
        (open_instruct.ROWS, {"loss_denominator": "1000"}, "loss_denominator", "divided by 1000 there"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_exactly_is_refused(
    rows: Sequence[Row], given: dict[str, Any], key: str, reason: str
) -> None:
    refused = {outcome.theirs: outcome.note for outcome in translate(rows, given).of(Kind.REFUSED)}
    assert reason in refused[key]


@pytest.mark.parametrize(
    ("rows", "given", "expected"),
    [
        (trl.ROWS, {"sync_ref_model": True, "beta": 0.1, **_TRL},
         {"loss.kl.mixup": 0.6, "loss.kl.refresh_steps": 128}),
        (trl.ROWS, {"router_aux_loss_coef": 0.001}, {"train.router_aux_loss_coef": 0.001}),
        (verl.ROWS, {"actor_rollout_ref.rollout.enable_rollout_routing_replay": True}, {"train.router_replay": True}),
        (areal.ROWS, {"rollout.return_routed_experts": True}, {"train.router_replay": True}),
        (trl.ROWS, {"use_vllm": True}, {"loss.correction.name": "sequence_mask", "loss.correction.args.cap": 3.0}),
        (trl.ROWS, {"scale_rewards": "batch"}, {"loss.advantage.name": "group_step_std"}),
        (trl.ROWS, {"max_prompt_length": 64}, {"data.max_prompt_tokens": 64, "data.drop_long_prompts": True}),
        (trl.ROWS, {"dtype": "float32"}, {"model.dtype": "bfloat16"}),
        (trl.ROWS, {"dtype": "float32", "bf16": False}, {"model.dtype": "float32"}),
        (verl.ROWS, {f"{_ACTOR}.use_kl_loss": True, f"{_ACTOR}.kl_loss_type": "low_var_kl+"},
         {"loss.kl.estimator": "k2"}),
        (verl.ROWS, {f"{_ACTOR}.use_kl_loss": True, f"{_ACTOR}.kl_loss_type": "k1+"}, {"loss.kl.estimator": "k2"}),
        (verl.ROWS, {f"{_ACTOR}.clip_ratio": 0.1}, {"loss.clip_low": 0.2, "loss.clip_high": 0.2}),
        (verl.ROWS, {"algorithm.rollout_correction.bypass_mode": True},
         {"loss.proximal": "engine", "loss.correction.name": "none"}),
        (verl.ROWS, {f"{_ROLLOUT}.val_kwargs.top_p": 0.7}, {"eval.top_p": 0.7, "rollout.top_p": 1}),
        (verl.ROWS, {f"{_ROLLOUT}.top_p": 0.9}, {"eval.top_p": 1.0, "rollout.top_p": 0.9}),
        (open_instruct.ROWS, {"eval_top_p": 0.95}, {"eval.top_p": 0.95}),
        (open_instruct.ROWS, {}, {"rollout.drop_zero_variance": True, "loss.clip_high": 0.272}),
        (open_instruct.ROWS, {"filter_zero_std_samples": False}, {"rollout.drop_zero_variance": False}),
        (open_instruct.ROWS, {"use_vllm_logprobs": True, "use_rho_correction": False},
         {"loss.proximal": "engine", "loss.correction.name": "none"}),
        (open_instruct.ROWS, {"ref_policy_update_freq": 10}, {"loss.kl.refresh_steps": 10, "loss.kl.mixup": 0.6}),
    ],
)  # fmt: skip
def test_a_value_means_what_it_means_there(
    rows: Sequence[Row], given: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = ours(rows, given)
    assert {key: found[key] for key in expected} == expected


class Watched(Theirs):
    """Collects the names that conversions read."""

    def __init__(self, rows: Sequence[Row], given: Mapping[str, Any]) -> None:
        super().__init__(rows, given)
        self.read: set[str] = set()

    def get(self, *names: str, default: Any = None) -> Any:
        self.read.update(names)
        return super().get(*names, default=default)

    def exact(self, name: str) -> Any:
        self.read.add(name)
        return super().exact(name)

    def is_given(self, name: str) -> bool:
        self.read.add(name)
        return super().is_given(name)

    def has(self, prefix: str) -> bool:
        self.read.add(prefix)
        return super().has(prefix)


@pytest.mark.parametrize(("system", "rows"), [(system, each.rows) for system, each in SYSTEMS.items()])
def test_a_row_reads_the_keys_that_it_accounts_for(system: str, rows: Sequence[Row]) -> None:
    """A key that counts as translated is read by a conversion, over all examples and defaults."""
    read: set[str] = set()
    for example in ({}, *(keys_of(each) for each in EXAMPLES[system].values()), *SWITCHES[system]):
        theirs = Watched(rows, example)
        for row in rows:
            for name in row.names:
                try:
                    row.converted(example.get(name, None if row.default is NOT_GIVEN else row.default), theirs)
                except (RefusedError, ByHandError, TypeError, ValueError):
                    continue
        read |= theirs.read
    prefixes = tuple(name for name in read if name.endswith("."))
    unread = {key for row in rows for key in row.also if key not in read and not key.startswith(prefixes or "\0")}
    assert unread == set()


@pytest.mark.parametrize(
    ("rows", "given", "expected"),
    [
        (trl.ROWS, {"use_peft": True}, (16, 32.0, "all-linear")),
        (trl.ROWS, {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj"]}, (4, 32.0, ["q_proj"])),
        (trl.ROWS, {"use_peft": False, "lora_r": 4}, (None, None, None)),
        (verl.ROWS, {"actor_rollout_ref.model.lora_rank": 64}, (64, 16.0, "all-linear")),
        (verl.ROWS, {"actor_rollout_ref.model.lora_rank": 0}, (None, None, None)),
    ],
)
def test_their_adapters_are_section_lora(rows: Sequence[Row], given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert tuple(ours(rows, given).get(f"lora.{key}") for key in ("rank", "alpha", "targets")) == expected


@pytest.mark.parametrize(
    ("rows", "given"),
    [
        (trl.ROWS, {"max_steps": "many"}),
        (verl.ROWS, {"data.train_batch_size": "large"}),
        (areal.ROWS, {"gconfig.n_samples": "many"}),
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
    translation = translate(trl.ROWS, {"top_k": 50, "lr_scheduler_type": "cosine", "lr_scheduler_kwargs.min_lr": 0.1})
    kinds = {outcome.theirs: outcome.kind for outcome in translation.outcomes}
    assert kinds["top_k"] is Kind.REFUSED
    assert kinds["lr_scheduler_type"] is Kind.DIFFERS


@pytest.mark.parametrize(("engine", "kind"), [("sglang", Kind.DIFFERS), ("trtllm", Kind.REFUSED)])
def test_vllm_stands_for_verls_sglang_and_for_no_other_engine(engine: str, kind: Kind) -> None:
    translation = translate(verl.ROWS, {f"{_ROLLOUT}.name": engine})
    assert f"{_ROLLOUT}.name" in {outcome.theirs for outcome in translation.of(kind)}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("value", [0, -1, 1.5, math.inf, math.nan, "x", "", [], [1], [{}], {}, {"a": 1}, True, None])
def test_no_value_of_a_key_is_a_traceback(system: str, value: Any) -> None:
    rows = SYSTEMS[system].rows
    for name in (name for row in rows for name in (*row.names, *row.also) if "*" not in name):
        assert translate(rows, {name: value}).outcomes
