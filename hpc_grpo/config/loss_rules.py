"""Check rules between the keys of what is optimised: loss, corrections, advantages, the reference and the teacher.

Each raises ConfigError with the rule, the values and the fix; `rules.py` has the others, and calls all.
"""

from __future__ import annotations

import json

from hpc_grpo.config.loss import ARGUMENTS, READERS, arguments_of, keys_read
from hpc_grpo.config.schema import Config
from hpc_grpo.config.section import Section
from hpc_grpo.errors import ConfigError


def _importance_weights(config: Config) -> None:
    correction = config.loss.importance_correction
    if config.rollout.top_p < 1.0 and correction != "none":
        raise ConfigError(
            f"rollout.top_p = {config.rollout.top_p:g}: engines renormalise over the nucleus and the learner does not, "
            f"so the importance weights of loss.importance_correction = {correction} would be wrong. Set "
            f"rollout.top_p=1, or loss.importance_correction=none."
        )
    low, cap = config.loss.importance_low, config.loss.importance_cap
    if low is not None and cap is not None and low >= cap:
        raise ConfigError(f"loss.importance_low = {low:g} must be less than loss.importance_cap = {cap:g}.")


def _keys_that_nothing_reads(config: Config) -> None:
    for key, (chosen, registry) in READERS.items():
        value, name = getattr(config.loss, key), getattr(config.loss, chosen)
        if value is not None and key not in (read := keys_read(registry, name)):
            raise ConfigError(
                f"loss.{key} = {value} would have no effect: loss.{chosen} = {name} does not read it, but "
                f"{', '.join(sorted(read)) or 'nothing of its kind'}. "
                f"Set loss.{key}=null, or choose another loss.{chosen}."
            )
    for key, (chosen, registry) in ARGUMENTS.items():
        name = getattr(config.loss, chosen)
        known = arguments_of(registry, name)
        if known is not None and (unknown := sorted(getattr(config.loss, key).keys() - known.keys())):
            raise ConfigError(
                f"loss.{key} has {', '.join(unknown)}, which loss.{chosen} = {name} does not read. It reads: "
                f"{', '.join(known) or 'none'}. Leave the others out, or choose another loss.{chosen}."
            )
        given = getattr(config.loss, key)
        for argument, papers in (known or {}).items():
            value = given[argument]
            if isinstance(papers, float) and type(value) not in (int, float):
                raise ConfigError(
                    f"loss.{key}.{argument} = {value!r} must be a number, such as {papers}; 1e-3 is a text in "
                    f"YAML, and 1.0e-3 a number."
                )
            high = argument.removesuffix("_low") + "_high"
            if argument.endswith("_low") and high in given and value >= given[high]:
                raise ConfigError(
                    f"loss.{key}.{argument} = {value:g} must be less than loss.{key}.{high} = {given[high]:g}: nothing "
                    f"lies between them. Lower it, or raise loss.{key}.{high}."
                )
    if config.loss.denominator_tokens is not None and config.loss.denominator != "constant":
        raise ConfigError(
            f"loss.denominator_tokens = {config.loss.denominator_tokens} would have no effect: loss.denominator = "
            f"{config.loss.denominator} does not read it. Set it to null, or loss.denominator=constant."
        )


def _keys_of_other_tasks(config: Config) -> None:
    """Refuse what another task would read: the run would look as if it did it."""
    task, needs = config.task, config.needs
    sections: tuple[tuple[str, Section, bool, str], ...] = (
        ("ppo", config.ppo, needs.critic, "critic"),
        ("distill", config.distill, needs.teacher, "teacher"),
    )
    for name, section, is_read, whose in sections:
        unset = type(section)()
        given = [key for key in type(section).model_fields if getattr(section, key) != getattr(unset, key)]
        if given and not is_read:
            key, value, default = given[0], getattr(section, given[0]), json.dumps(getattr(unset, given[0]))
            raise ConfigError(
                f"{name}.{key} = {value} would have no effect: task = {task} has no {whose}. Set task={name}, or "
                f"{name}.{key}={default}, its default."
            )
    for key in ("dynamic_sampling", "drop_zero_variance", "mask_truncated", "overlong_tokens"):
        if (value := getattr(config.rollout, key)) and not needs.rollouts:
            raise ConfigError(
                f"rollout.{key} = {str(value).lower()} would have no effect: task = {task} samples nothing. Set it to "
                f"{'false' if value is True else 'null'}."
            )
    _keys_of_rewards(config)


def _keys_of_rewards(config: Config) -> None:
    """Refuse what makes advantages of rewards where none are made of them."""
    loss, overlong = config.loss, config.rollout.overlong_tokens
    if config.needs.critic and loss.advantage != "group":
        raise ConfigError(
            f"loss.advantage = {loss.advantage} would have no effect: task = {config.task} makes advantages in its "
            f"critic. Set loss.advantage=group, its default, or task=grpo."
        )
    if config.needs.teacher and not config.needs.rewards:
        for key, value, default in (
            ("loss.advantage", loss.advantage if loss.advantage != "group" else None, "group"),
            ("rollout.overlong_tokens", overlong, "null"),
        ):
            if value is not None:
                raise ConfigError(
                    f"{key} = {value} would have no effect: with distill.reward_coef = 0 no advantage is made of "
                    f"rewards. Set {key}={default}, or distill.reward_coef above 0."
                )


def _advantages(config: Config) -> None:
    if config.loss.pass_k is not None and config.loss.pass_k > config.rollout.group_size:
        raise ConfigError(
            f"loss.pass_k = {config.loss.pass_k} must be at most rollout.group_size = {config.rollout.group_size}. "
            f"Lower it, or raise rollout.group_size."
        )
    for key, off in (("drop_zero_variance", "false"), ("dynamic_sampling", "null")):
        if (value := getattr(config.rollout, key)) and (config.needs.critic or config.needs.teacher):
            whose = "critic" if config.needs.critic else "teacher"
            raise ConfigError(
                f"rollout.{key} = {str(value).lower()}: task = {config.task} makes advantages in its {whose}, which "
                f"are not 0 where all rewards are equal. Set it to {off}."
            )
    overlong, longest = config.rollout.overlong_tokens, config.rollout.max_new_tokens
    if overlong is not None and overlong > longest:
        raise ConfigError(
            f"rollout.overlong_tokens = {overlong} must be at most rollout.max_new_tokens = {longest}. Lower it."
        )


def _proximal(config: Config) -> None:
    loss = config.loss
    if loss.compares_minibatch and loss.proximal == "interpolated":
        raise ConfigError(
            f"loss.proximal = interpolated, but loss.name = {loss.name} with loss.importance_correction = "
            f"{loss.importance_correction} compares all tokens of an optimizer step by their proximal logprobs, before "
            f"it. Set loss.proximal=recomputed."
        )


def _kl(config: Config) -> None:
    refresh, mixup = config.loss.ref_refresh_steps, config.loss.ref_mixup
    if refresh is not None and not config.needs.reference:
        raise ConfigError(
            f"loss.ref_refresh_steps = {refresh} would have no effect: the run has no reference. Set it to null, or "
            f"loss.kl_coef above 0."
        )
    if refresh is None and mixup < 1.0:
        raise ConfigError(
            f"loss.ref_mixup = {mixup:g} would have no effect: the reference is frozen. Set loss.ref_refresh_steps to "
            f"the steps between two refreshes, or loss.ref_mixup=1."
        )
    if config.loss.kl_in == "reward" and config.loss.kl_estimator == "unbiased":
        raise ConfigError(
            "loss.kl_estimator = unbiased has a meaning in the gradient alone, and loss.kl_in = reward has none. "
            "Set loss.kl_estimator to k1, k2 or k3, or loss.kl_in=loss."
        )
    if config.loss.kl_in == "reward" and config.loss.compares_advantages:
        raise ConfigError(
            f"loss.name = {config.loss.name} compares the advantages of an optimizer step before it, and loss.kl_in = "
            f"reward changes them in it: other tokens than loss.cov_fraction would be chosen. Set loss.kl_in=loss."
        )


def _distillation(config: Config) -> None:
    if not config.needs.teacher:
        return
    _ = config.distill.required_teacher
    if config.loss.compares_advantages:
        raise ConfigError(
            f"loss.name = {config.loss.name} compares the advantages of an optimizer step before it, and the teacher "
            f"makes them in it. Choose another loss.name, such as grpo."
        )


LOSS_RULES = (
    _importance_weights,
    _keys_that_nothing_reads,
    _keys_of_other_tasks,
    _advantages,
    _proximal,
    _kl,
    _distillation,
)
