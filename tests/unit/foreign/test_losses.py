"""A step's loss on fixed numbers, by a translated config, equals the peer's formula: settings of their own examples."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from hpc_grpo.algorithms.objective import policy_objective
from hpc_grpo.algorithms.terms import LossInputs
from hpc_grpo.config import Config
from hpc_grpo.config.load import load_values
from hpc_grpo.foreign.systems import SYSTEMS
from hpc_grpo.foreign.table import Kind
from hpc_grpo.types import Minibatch
from tests.unit.foreign import peers
from tests.unit.foreign.examples import AREAL, OPEN_INSTRUCT, TRL, VERL
from tests.unit.foreign.peers import Completion, Step
from tests.unit.foreign.test_examples import keys_of

EXAMPLES = {"areal": AREAL, "verl": VERL, "open_instruct": OPEN_INSTRUCT, "trl": TRL}


def step_of(seed: int = 0, spread: float = 0.4) -> Step:
    """Two groups of three completions, with rewards and lengths that are all different."""
    draw = random.Random(seed)

    def completion(reward: float, length: int) -> Completion:
        old = [draw.uniform(-3.0, -0.1) for _ in range(length)]
        return Completion(reward, *([own + draw.gauss(0.0, spread) for own in old] if moved else list(old)
                                    for moved in (True, False, True, True)))  # fmt: skip

    return [[completion(r, n) for r, n in group] for group in (
        ((1.0, 3), (0.0, 5), (0.25, 2)), ((0.0, 4), (0.75, 1), (0.5, 6)))]  # fmt: skip


STEP = step_of()
MATCHING = [[dataclasses.replace(each, engine=each.old) for each in group] for group in STEP]


def loaded(system: str, keys: Mapping[str, Any]) -> Config:
    return load_values(SYSTEMS[system].translated(keys).values, [], system)


def ours(config: Config, step: Step, advantages: Sequence[Sequence[float]] | None = None) -> float:
    """The loss of an optimizer step over all completions, as the learner computes it."""
    if advantages is None:
        rewards = [tuple(each.reward for each in group) for group in step]
        advantages = config.loss.advantage.of_step(rewards, [(True,) * len(group) for group in step])
    rows = [each for group in step for each in group]
    of_rows = [own for group in advantages for own in group]

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([value for row in rows for value in getattr(row, name)], dtype=torch.float64)

    counts = torch.tensor([row.length for row in rows])
    ids = torch.arange(len(rows)).repeat_interleave(counts)
    proximal = flat("engine") if config.loss.proximal == "engine" else flat("old")
    inputs = LossInputs(
        flat("learner"), proximal, flat("engine"), flat("ref") if config.needs.reference else None,
        torch.tensor(of_rows, dtype=torch.float64).repeat_interleave(counts), ids,
    )  # fmt: skip
    objective = policy_objective(config.loss)
    weights = objective.token_weights(config.rollout.max_new_tokens, ids, torch.ones(len(ids), dtype=torch.float64))
    divisor = objective.divisor(Minibatch(tuple(range(len(rows))), int(counts.sum()), len(rows)))
    return float(torch.dot(objective.loss(inputs).per_token, weights.of_tokens)) / divisor


CASES: dict[tuple[str, str], Callable[[Step], float]] = {
    ("trl", "gspo"): lambda step: peers.trl(
        step, loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
    ("trl", "dapo"): lambda step: peers.trl(step, epsilon_high=0.28),
    ("trl", "dr-grpo"): lambda step: peers.trl(
        step, loss_type="dr_grpo", scale_rewards=False, max_completion_length=3000),
    ("trl", "cispo"): lambda step: peers.trl(step, loss_type="cispo", epsilon_high=5.0, scale_rewards="batch"),
    ("trl", "masked"): lambda step: peers.trl(step, min=0.5, max=2.0),
    ("verl", "qwen2-7b"): lambda step: peers.verl(step, kl=0.001),
    ("verl", "cispo"): lambda step: peers.verl(step, loss_mode="cispo", low=10, high=0.2, kl=0.001),
    ("verl", "gspo"): lambda step: peers.verl(
        step, loss_mode="gspo", low=3e-4, high=4e-4, agg="seq-mean-token-mean"),
    ("open_instruct", "olmo3-2026"): lambda step: peers.open_instruct(step, beta=0.0),
    ("open_instruct", "qwen3-4b"): lambda step: peers.open_instruct(step, beta=0.0),
    ("open_instruct", "qwen7b"): lambda step: peers.open_instruct(step, beta=0.0),
}  # fmt: skip


@pytest.mark.parametrize(("system", "name"), CASES)
def test_the_loss_of_an_example_is_the_peers(system: str, name: str) -> None:
    config = loaded(system, keys_of(EXAMPLES[system][name]))
    for step in (STEP, step_of(1), step_of(2, spread=0.02)):
        assert ours(config, step) == pytest.approx(CASES[system, name](step), rel=1e-9)


AREALS: dict[str, dict[str, Any]] = {
    "boba-1.0.4": {"eps_clip": 0.4},
    "gspo-1.0.4": {"eps_clip": 0.4, "level": "sequence"},
    "sapo-1.0.4": {"decoupled": False, "recompute": False, "sapo": (1.0, 1.05)},
}


def notes_of(system: str, keys: Mapping[str, Any]) -> str:
    return "; ".join(outcome.note for outcome in SYSTEMS[system].translated(keys).of(Kind.DIFFERS))


@pytest.mark.parametrize("name", AREALS)
def test_areals_loss_is_its_own_and_its_second_norm_is_the_difference_that_is_told(name: str) -> None:
    keys = keys_of(AREAL[name])
    config = loaded("areal", keys)
    first = peers.areal_advantages(STEP, 10.0, -0.5)
    second = peers.over_tokens(STEP, first)
    assert ours(config, STEP, second) == pytest.approx(peers.areal(STEP, second, **AREALS[name]), rel=1e-9)
    assert "A = (b - mean(b)) / deviation(b) over tokens; here, A = b" in notes_of("areal", keys)
    without = {key: value for key, value in keys.items() if not key.startswith("actor.adv_norm")}
    config = loaded("areal", without)
    assert ours(config, STEP) == pytest.approx(peers.areal(STEP, first, **AREALS[name]), rel=1e-9)
    assert ours(config, STEP) != pytest.approx(peers.areal(STEP, second, **AREALS[name]), rel=1e-3)


def test_areals_ratio_of_a_sequence_leaves_masked_tokens_out_and_the_difference_is_told() -> None:
    keys = {**_AREAL, "actor.use_decoupled_loss": True, "actor.importance_sampling_level": "sequence"}
    masked = {**keys, "actor.rejection_sampling.upper": 1.2}
    assert ours(loaded("areal", keys), STEP) == pytest.approx(
        peers.areal(STEP, _norm(STEP), level="sequence", upper=None), rel=1e-9)  # fmt: skip
    assert ours(loaded("areal", masked), STEP) != pytest.approx(
        peers.areal(STEP, _norm(STEP), level="sequence", upper=1.2), rel=1e-9)  # fmt: skip
    note = "a sequence's ratio is over its unmasked tokens"
    assert (note in notes_of("areal", keys), note in notes_of("areal", masked)) == (False, True)


_TRL = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": "accuracy_reward", "use_vllm": True,
        "max_steps": 10}  # fmt: skip
_VERL = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 3, "actor_rollout_ref.model.path": "m",
         "data.train_files": "d", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1}  # fmt: skip
_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_AREAL = {"actor.path": "m", "train_dataset.path": "d", "gconfig.n_samples": 3, "actor.kl_ctl": 0.0,
          "rollout.backend": "vllm:d4", "actor.backend": "fsdp:d4", "cluster.n_nodes": 1, "train_dataset.batch_size": 8,
          "actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": "group",
          "actor.reward_norm.group_size": 3}  # fmt: skip
_INSTRUCT = {"model_name_or_path": "m", "dataset_mixer_list": ["d", 1.0]}


@pytest.mark.parametrize(
    ("system", "keys", "peer"),
    [
        ("trl", {}, lambda step: peers.trl(step)),
        ("trl", {"loss_type": "grpo"}, lambda step: peers.trl(step, loss_type="grpo")),
        ("trl", {"loss_type": "sapo", "sapo_temperature_neg": 2.0},
         lambda step: peers.trl(step, loss_type="sapo", sapo=(1.0, 2.0))),
        ("trl", {"loss_type": "luspo", "importance_sampling_level": "sequence"},
         lambda step: peers.trl(step, loss_type="luspo", importance_sampling_level="sequence")),
        ("trl", {"delta": 1.3}, lambda step: peers.trl(step, delta=1.3)),
        ("trl", {"scale_rewards": "batch"}, lambda step: peers.trl(step, scale_rewards="batch")),
        ("trl", {"vllm_importance_sampling_clip_max": 1.2}, lambda step: peers.trl(step, max=1.2)),
        ("trl", {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.8},
         lambda step: peers.trl(step, mode="token_mask", min=0.8)),
        ("trl", {"vllm_importance_sampling_mode": "sequence_truncate"},
         lambda step: peers.trl(step, mode="sequence_truncate")),
        ("trl", {"beta": 0.1, "use_bias_correction_kl": False},
         lambda step: peers.trl(step, beta=0.1, use_bias_correction_kl=False)),
        ("verl", {}, lambda step: peers.verl(step)),
        ("verl", {f"{_ACTOR}.clip_ratio": 0.05}, lambda step: peers.verl(step)),
        ("verl", {f"{_ACTOR}.clip_ratio_high": 0.05}, lambda step: peers.verl(step, high=0.05)),
        ("verl", {f"{_ACTOR}.clip_ratio_c": 1.1}, lambda step: peers.verl(step, c=1.1)),
        ("verl", {f"{_ACTOR}.policy_loss.loss_mode": "sapo", f"{_ACTOR}.tau_pos": 2.0},
         lambda step: peers.verl(step, loss_mode="sapo", taus=(2.0, 1.05), agg="seq-mean-token-mean")),
        ("verl", {"algorithm.adv_estimator": "rloo"}, lambda step: peers.verl(step, estimator="rloo")),
        ("verl", {f"{_CORRECTION}.rollout_is": "token"}, lambda step: peers.verl(step, level="token")),
        ("verl", {f"{_CORRECTION}.rollout_is": "sequence", f"{_CORRECTION}.rollout_is_threshold": "0.8_1.4"},
         lambda step: peers.verl(step, level="sequence", lower=0.8, threshold=1.4)),
        ("areal", {}, lambda step: peers.areal(step, _norm(step), decoupled=False, recompute=False)),
        ("areal", {"actor.recompute_logprob": True}, lambda step: peers.areal(step, _norm(step), decoupled=False)),
        ("areal", {"actor.use_decoupled_loss": True}, lambda step: peers.areal(step, _norm(step), upper=None)),
        ("areal", {"actor.use_decoupled_loss": True, "actor.rejection_sampling.upper": 1.2},
         lambda step: peers.areal(step, _norm(step), upper=1.2)),
        ("areal", {"actor.use_decoupled_loss": True, "actor.behav_imp_weight_cap": 1.2},
         lambda step: peers.areal(step, _norm(step), upper=1.2)),
        ("open_instruct", {}, lambda step: peers.open_instruct(step)),
        ("open_instruct", {"loss_fn": "cispo"}, lambda step: peers.open_instruct(step, loss_fn="cispo")),
        ("open_instruct", {"advantage_normalization_type": "standard"},
         lambda step: peers.open_instruct(step, advantage="standard")),
        ("open_instruct", {"rho_clamp_upper_bound": 0.0, "rho_mask_lower_bound": 0.9, "rho_mask_upper_bound": 1.4},
         lambda step: peers.open_instruct(step, mask=(0.9, 1.4))),
    ],
)  # fmt: skip
def test_the_loss_of_a_setting_is_the_peers(system: str, keys: dict[str, Any], peer: Callable[[Step], float]) -> None:
    base = {"trl": _TRL, "verl": _VERL, "areal": _AREAL, "open_instruct": _INSTRUCT}[system]
    config = loaded(system, {**base, **keys})
    for step in (STEP, step_of(3)):
        assert ours(config, step) == pytest.approx(peer(step), rel=1e-9)


def _norm(step: Step) -> list[list[float]]:
    return peers.areal_advantages(step, 1.0, 0.0)


def test_trls_kl_is_that_of_ours_where_the_engine_agrees_and_else_the_difference_is_told() -> None:
    keys = keys_of(TRL["intellect-2"])
    config, peer = loaded("trl", keys), {"delta": 4, "epsilon": 0.2, "beta": 0.001}
    assert ours(config, MATCHING) == pytest.approx(peers.trl(MATCHING, **peer), rel=1e-9)
    assert ours(config, STEP) != pytest.approx(peers.trl(STEP, **peer), rel=1e-9)
    told = {outcome.theirs: outcome.note for outcome in SYSTEMS["trl"].translated(keys).of(Kind.DIFFERS)}
    assert told["beta"] == "r * k3 there; here w * r * k3, with w of loss.correction: equal if that is none"


def test_verls_kl_in_the_reward_comes_before_the_normalisation_and_the_difference_is_told() -> None:
    keys = keys_of(VERL["rloo"])
    told = {outcome.theirs: outcome.note for outcome in SYSTEMS["verl"].translated(keys).outcomes}
    assert "A = norm(r - coef * sum of KL)" in told[f"{_ACTOR}.use_kl_loss"]
    assert "A_t = norm(r) - coef * sum of the KL from t on" in told[f"{_ACTOR}.use_kl_loss"]
