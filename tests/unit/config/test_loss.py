from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_grpo.config import LossConfig, load_config, load_resolved, to_yaml, with_overrides
from hpc_grpo.config.rules import check_rules
from hpc_grpo.errors import ConfigError
from tests.support.configs import minimal_config

OF_BEFORE = {
    "name": "grpo",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "kl_coef": 0.0,
    "advantage": "group",
    "normalize_std": True,
    "importance_correction": "truncated",
    "importance_cap": 2.0,
}
"""The whole section as runs had it that were begun before it had other keys."""


@pytest.mark.parametrize("changes", [{}, {"importance_correction": "none"}, {"clip_high": 0.28, "kl_coef": 0.1}])
def test_a_run_begun_with_fewer_keys_resumes_with_the_same_settings(tmp_path: Path, changes: dict[str, Any]) -> None:
    values = yaml.safe_load(to_yaml(minimal_config(loss=changes)))
    values["loss"] = {**OF_BEFORE, **changes}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    resolved = load_resolved(tmp_path / "config.yaml")
    expected = minimal_config(loss=changes).loss
    cap = resolved.loss.importance_cap if expected.importance_correction == "none" else expected.importance_cap
    assert resolved.loss == expected.model_copy(update={"importance_cap": cap})
    assert resolved.loss.denominator == "tokens"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"name": "dapo"}, {"clip_low": 0.2, "clip_high": 0.28, "denominator": "tokens"}),
        ({"name": "dapo", "clip_high": 0.5}, {"clip_low": 0.2, "clip_high": 0.5}),
        ({"name": "dr_grpo"}, {"denominator": "constant", "normalize_std": False}),
        ({"name": "dr_grpo", "advantage": "rloo"}, {"normalize_std": None}),
        ({"name": "gspo", "denominator": "tokens"}, {"denominator": "tokens", "clip_high": 4e-4}),
        ({"name": "sapo"}, {"clip_low": None, "gate_temperatures": (1.0, 1.05)}),
        ({"name": "decoupled_ppo"}, {"importance_correction": "icepop", "importance_low": 0, "importance_cap": 5}),
        (
            {"name": "decoupled_ppo", "importance_correction": "truncated"},
            {"importance_low": None, "importance_cap": 2},
        ),
        ({"advantage": "pass_k"}, {"pass_k": 4, "normalize_std": None}),
        ({"name": "own.py:loss", "advantage": "own.py:a"}, {"clip_low": 0.2, "clip_high": 0.2, "normalize_std": True}),
    ],
)
def test_null_takes_what_the_papers_of_what_is_chosen_have(given: dict[str, Any], found: dict[str, Any]) -> None:
    settings = LossConfig(**given)
    assert {key: getattr(settings, key) for key in found} == found
    assert LossConfig(**settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"name": "sapo", "clip_low": 0.2}, "loss.clip_low = 0.2 would have no effect: loss.name = sapo does not read"),
        ({"name": "cispo", "dual_clip": 3.0}, "loss.dual_clip = 3.0 would have no effect: loss.name = cispo does not"),
        ({"importance_low": 0.5}, "loss.importance_correction = truncated does not read it, but importance_cap"),
        (
            {"advantage": "rloo", "normalize_std": True},
            "loss.advantage = rloo does not read it, but nothing of its kind",
        ),
        ({"pass_k": 2}, "loss.pass_k = 2 would have no effect: loss.advantage = group"),
        ({"advantage": "pass_k", "pass_k": 99}, "loss.pass_k = 99 must be at most rollout.group_size = 8"),
        ({"kl_in": "reward", "kl_estimator": "unbiased"}, "Set loss.kl_estimator to k1, k2 or k3, or loss.kl_in=loss"),
        (
            {"kl_in": "reward", "name": "kl_cov"},
            "other tokens than loss.cov_fraction would be chosen. Set loss.kl_in=loss",
        ),
        (
            {"kl_in": "reward", "name": "clip_cov"},
            "loss.name = clip_cov compares the advantages of an optimizer step before it",
        ),
        (
            {"name": "clip_cov", "args": {"cov_lo": 1.0}},
            "loss.args has cov_lo, which loss.name = clip_cov does not read. It reads: cov_low, cov_high",
        ),
        (
            {"name": "clip_cov", "args": {"cov_low": "1e-3"}},
            "loss.args.cov_low = '1e-3' must be a number, such as 1.0; 1e-3 is a text in YAML",
        ),
        (
            {"name": "clip_cov", "args": {"cov_low": 5}},
            "loss.args.cov_low = 5 must be less than loss.args.cov_high = 5: nothing lies between them",
        ),
        ({"args": {"a": 1}}, "loss.args has a, which loss.name = grpo does not read. It reads: none"),
        ({"advantage_args": {"a": 1}}, "loss.advantage_args has a, which loss.advantage = group does not read"),
        ({"correction_args": {"a": 1}}, "which loss.importance_correction = truncated does not read"),
        ({"ref_refresh_steps": 5}, "loss.ref_refresh_steps = 5 would have no effect: the run has no reference"),
        ({"kl_coef": 0.1, "ref_mixup": 0.5}, "loss.ref_mixup = 0.5 would have no effect: the reference is frozen"),
        ({"denominator_tokens": 7}, "loss.denominator_tokens = 7 would have no effect: loss.denominator = tokens does"),
        ({"importance_correction": "icepop", "importance_low": 6}, "must be less than loss.importance_cap = 5"),
        ({"importance_correction": "m2po", "proximal": "interpolated"}, "Set loss.proximal=recomputed"),
        ({"importance_correction": "icepopp"}, "Correction 'icepopp' does not exist; did you mean 'icepop'?"),
    ],
)
def test_a_key_without_effect_and_a_contradiction_are_refused(loss: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rules(minimal_config(loss=loss))
    assert words in str(caught.value)


def test_settings_of_a_loss_s_own_that_are_left_out_are_those_of_its_paper() -> None:
    assert LossConfig(name="clip_cov").args == {"cov_low": 1.0, "cov_high": 5.0}
    assert LossConfig(name="clip_cov", args={"cov_high": 9.0}).args == {"cov_low": 1.0, "cov_high": 9.0}
    own = {"name": "mine.py:loss", "args": {"anything": 1}, "advantage": "mine.py:advantage"}
    check_rules(minimal_config(loss=own))


def test_bounds_of_which_the_logarithm_is_taken_are_above_zero() -> None:
    with pytest.raises(ConfigError, match=r"loss\.importance_cap = 0: Input should be greater than 0"):
        load_config("local/debug", ["loss.importance_cap=0"])


def test_an_advantage_that_a_critic_would_replace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss\.advantage = rloo would have no effect: task = ppo makes advantages"):
        check_rules(minimal_config(task="ppo", loss={"advantage": "rloo"}))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"ppo": {"critic_lr": 1e-4}}, "ppo.critic_lr = 0.0001 would have no effect: task = grpo has no critic. Set "),
        ({"ppo": {"critic": "c"}}, "Set task=ppo, or ppo.critic=null, its default"),
        ({"task": "ppo", "distill": {"coef": 2.0}}, "distill.coef = 2.0 would have no effect: task = ppo has no teach"),
        (
            {"task": "sft", "rollout": {"dynamic_sampling": 2}},
            "rollout.dynamic_sampling = 2 would have no effect",
        ),
        ({"task": "sft", "rollout": {"mask_truncated": True}}, "task = sft samples nothing. Set it to false."),
    ],
)
def test_a_key_that_another_task_reads_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rules(minimal_config(**sections))
    assert words in str(caught.value)


def test_another_loss_in_an_override_of_a_resolved_config_keeps_what_was_resolved() -> None:
    config = with_overrides(load_config("local/debug"), ["loss.name=dapo"])
    assert config.loss.clip_high == 0.2


def test_the_penalty_of_long_completions_must_fit_into_a_completion() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.overlong_tokens = 300 must be at most rollout\.max_new_tokens"):
        check_rules(minimal_config(rollout={"overlong_tokens": 300}))
    with pytest.raises(ConfigError, match="task = ppo makes advantages in its critic"):
        check_rules(minimal_config(task="ppo", rollout={"drop_zero_variance": True}))
    with pytest.raises(ConfigError, match=r"rollout\.dynamic_sampling = 2: task = ppo .* Set it to null"):
        check_rules(minimal_config(task="ppo", rollout={"dynamic_sampling": 2}))
