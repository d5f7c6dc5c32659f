"""Check rules between section `loss` and others: sampling, the task, the teacher.

Each raises ConfigError with the rule, the values and the fix. `rules.py` holds the other rules and calls all of them.
"""

from __future__ import annotations

from hpc_grpo.algorithms.advantages import PassKAdvantage, TurnsAdvantage
from hpc_grpo.config.schema import Config
from hpc_grpo.errors import ConfigError


def _importance_weights(config: Config) -> None:
    correction, rollout = config.loss.correction.name, config.rollout
    for key, value, off, over in (
        ("top_p", rollout.top_p, 1, "the nucleus"),
        ("min_new_tokens", rollout.min_new_tokens, 0, "the tokens that do not end a completion"),
    ):
        if value != off and correction != "none" and config.needs.rollouts:
            raise ConfigError(
                f"rollout.{key} = {value:g}: engines renormalise over {over} and the learner does not. The "
                f"importance weights of loss.correction = {correction} would be wrong. Set rollout.{key}={off}, "
                "or loss.correction=none."
            )


def _rewards(config: Config) -> None:
    """Raise ConfigError for keys of reward advantages if the task uses no rewards."""
    if not config.needs.teacher or config.needs.rewards:
        return
    for key, is_default, default in (
        ("loss.advantage", config.loss.advantage == type(config.loss).model_fields["advantage"].default, "group"),
        ("rollout.overlong_tokens", config.rollout.overlong_tokens is None, "null"),
    ):
        if not is_default:
            raise ConfigError(
                f"{key} would have no effect: with task.args.reward_coef = 0 no advantage is made of rewards. Set "
                f"{key}={default}, or task.args.reward_coef above 0."
            )


def _advantages(config: Config) -> None:
    advantage, group_size = config.loss.advantage, config.rollout.group_size
    if isinstance(advantage, PassKAdvantage) and advantage.args.k > group_size:
        raise ConfigError(
            f"loss.advantage.args.k = {advantage.args.k} must be at most rollout.group_size = {group_size}. "
            "Lower it, or raise rollout.group_size."
        )
    overlong, longest = config.rollout.overlong_tokens, config.rollout.max_new_tokens
    if overlong is not None and overlong > longest:
        raise ConfigError(
            f"rollout.overlong_tokens = {overlong} must be at most rollout.max_new_tokens = {longest}. Lower it."
        )
    is_played = [key in config.environments for key, _ in config.data.sources(for_eval=False)]
    if overlong is not None and all(is_played):
        raise ConfigError(
            f"rollout.overlong_tokens = {overlong} would have no effect. It penalises long single answers, and "
            "all prompts use an environment. Set it to null, or let the environment's rewards penalise length."
        )
    if isinstance(advantage, TurnsAdvantage) and not any(is_played):
        raise ConfigError(
            "loss.advantage = turns compares the turns of episodes, and no prompt is played in an environment. Set "
            "loss.advantage=group, or environment."
        )


def _proximal(config: Config) -> None:
    loss = config.loss
    if loss.proximal == "engine" and loss.correction.name != "none":
        raise ConfigError(
            f"loss.correction = {loss.correction.name} would have no effect: with loss.proximal = engine the "
            "ratio already uses the engine's logprobs. Set loss.correction=none, or loss.proximal=recomputed."
        )
    if loss.proximal == "interpolated" and (loss.compares_minibatch or loss.correction.compares_minibatch):
        raise ConfigError(
            "loss.proximal = interpolated has no proximal logprobs before the optimizer step. loss.name = "
            f"{loss.name} with loss.correction = {loss.correction.name} needs them to compare tokens. Set "
            "loss.proximal=recomputed."
        )


def _kl(config: Config) -> None:
    kl = config.loss.kl
    if not config.needs.reference:
        for key, value in kl.model_dump(exclude={"coef"}, exclude_defaults=True).items():
            raise ConfigError(
                f"loss.kl.{key} = {value} would have no effect: the run has no reference. Leave loss.kl.{key} out, or "
                f"set loss.kl.coef above 0."
            )
    if kl.refresh_steps is not None and kl.reference is not None:
        raise ConfigError(
            f"loss.kl.refresh_steps = {kl.refresh_steps} would replace the reference loss.kl.reference = "
            f"{kl.reference} by the policy. Set one of the two to null."
        )
    if kl.refresh_steps is None and kl.mixup < 1.0:
        raise ConfigError(
            f"loss.kl.mixup = {kl.mixup:g} would have no effect: the reference is frozen. Set loss.kl.refresh_steps to "
            f"the steps between two refreshes, or loss.kl.mixup=1."
        )
    if kl.where == "reward" and kl.estimator == "unbiased":
        raise ConfigError(
            "loss.kl.estimator = unbiased changes only the gradient, and loss.kl.where = reward has no gradient. "
            "Set loss.kl.estimator to k1, k2 or k3, or loss.kl.where=loss."
        )
    if kl.where == "reward" and config.loss.compares_minibatch:
        raise ConfigError(
            f"loss.name = {config.loss.name} compares advantages before an optimizer step, and loss.kl.where = reward "
            "changes them during the step. loss.args.fraction would select wrong tokens. Set loss.kl.where=loss."
        )


def _distillation(config: Config) -> None:
    if not config.needs.teacher:
        return
    _ = config.task_args.required_teacher
    if config.loss.compares_minibatch:
        raise ConfigError(
            f"loss.name = {config.loss.name} compares advantages before an optimizer step, and the teacher makes "
            "them during the step. Choose another loss.name, such as grpo."
        )


LOSS_RULES = (_importance_weights, _rewards, _advantages, _proximal, _kl, _distillation)
