"""Check rules that span several fields; each raises ConfigError with the rule, the values and the fix.

Over 250 lines, so that every rule between keys is found in one file.
"""

from __future__ import annotations

import re

from hpc_grpo.config.loss import ARGUMENTS, READERS, arguments_of, keys_read
from hpc_grpo.config.schema import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import ADVANTAGES, ALGORITHMS, CORRECTIONS, LOSSES, REWARDS

_EVAL_SET = re.compile("[A-Za-z][A-Za-z0-9_-]*")


def check_rules(config: Config) -> None:
    """Raise ConfigError for the first rule that `config` breaks."""
    for rule in _RULES:
        rule(config)


def _run_name(config: Config) -> None:
    name = config.run.name
    if not name or name in (".", "..") or "/" in name or "\0" in name or len(name.encode()) > 200:
        raise ConfigError(
            f"run.name = {name!r}: must be one folder name of at most 200 bytes, without '/'. Choose another name."
        )


def _one_length(config: Config) -> None:
    lengths = ("total_steps", "total_episodes", "total_epochs")
    given = [f"train.{name}" for name in lengths if getattr(config.train, name) is not None]
    if len(given) != 1:
        raise ConfigError(
            f"Exactly one of train.total_steps, train.total_episodes and train.total_epochs must be set; "
            f"set are: {', '.join(given) or 'none'}. Give one, and set the others to null."
        )


def _nodes(config: Config) -> None:
    slurm, num_nodes = config.launch.slurm, config.launch.num_nodes
    if slurm.min_nodes is not None and slurm.min_nodes > num_nodes:
        raise ConfigError(
            f"launch.slurm.min_nodes = {slurm.min_nodes} must be at most launch.num_nodes = {num_nodes}: "
            f"it says how many must be left of them. Lower it, or set it to null."
        )
    if config.needs.critic and slurm.min_nodes is not None and slurm.min_nodes < num_nodes:
        raise ConfigError(
            f"launch.slurm.min_nodes = {slurm.min_nodes} would have a run with a critic go on with fewer nodes than "
            f"launch.num_nodes = {num_nodes}, and a critic is resumed with as many learners as before. Set it to null: "
            f"the job that follows goes on with all nodes."
        )
    if slurm.max_job_chains is None and not slurm.jobs_can_submit:
        raise ConfigError(
            "launch.slurm.jobs_can_submit = false, so all follow-on jobs are queued at the start, and "
            "launch.slurm.max_job_chains = null does not say how many. Give a number (submit --chain N)."
        )


def _lag_and_minibatches(config: Config) -> None:
    lag, minibatches = config.rollout.max_policy_lag, config.train.num_minibatches
    if lag % minibatches:
        raise ConfigError(
            f"rollout.max_policy_lag = {lag} counts optimizer steps and must be a multiple of "
            f"train.num_minibatches = {minibatches}. Set it to one, or change train.num_minibatches."
        )
    if config.needs.rollouts and minibatches > config.rollout.prompts_per_step:
        raise ConfigError(
            f"train.num_minibatches = {minibatches} exceeds rollout.prompts_per_step = "
            f"{config.rollout.prompts_per_step}: a minibatch holds at least one group. Lower it, or "
            f"raise rollout.prompts_per_step."
        )


def _names(config: Config) -> None:
    """Check built-in ones alone: a module of the user's is the job's to import."""
    ALGORITHMS.check(config.task)
    LOSSES.check(config.loss.name)
    CORRECTIONS.check(config.loss.importance_correction)
    ADVANTAGES.check(config.loss.advantage)
    if config.needs.rollouts:
        for reward in config.rewards_by_key.values():
            REWARDS.check(reward.name)
        if config.needs.rewards and not all(config.reward_sets):
            raise ConfigError("rewards is empty. Name at least one, such as correctness.")


def _eval(config: Config) -> None:
    if not config.eval.every.is_ever:
        return
    (key, *_) = (f"eval.every_{unit}" for unit in ("steps", "epochs", "s") if getattr(config.eval, f"every_{unit}"))
    if not config.needs.rollouts:
        raise ConfigError(f"{key} is set, but task {config.task} has no engines to sample with. Set it to null.")
    if not config.data.has_eval:
        raise ConfigError(
            f"{key} is set, but data.eval is not. Give a held-out data set, hold a share of data.train out "
            f"(data.held_out={{fraction: 0.05}}), or set {key} to null."
        )
    for name in ("", *config.data.eval_sets):
        of_set, where = config.eval_settings(name), f"data.eval_sets.{name}" if name else "eval"
        if max(of_set.pass_k, default=1) > of_set.num_samples:
            raise ConfigError(
                f"{where}.pass_k = {of_set.pass_k}: every k must be at most {where}.num_samples = "
                f"{of_set.num_samples}. Leave the larger ones out, or raise {where}.num_samples."
            )
    sources = config.data.sources(for_eval=True)
    if config.data.held_out is not None:
        sources += config.data.sources(for_eval=False)
    if all(source.rewards is not None for _, source in sources):
        return
    if config.eval.reward not in {reward.name for reward in config.rewards}:
        raise ConfigError(
            f"eval.reward = {config.eval.reward!r} must be one of rewards: "
            f"{', '.join(reward.name for reward in config.rewards)}. Name one of them, or add it to rewards."
        )


def _mixes(config: Config) -> None:
    for key, source in config.data.sources(for_eval=True):
        if source.weight is not None or source.count is not None:
            raise ConfigError(
                f"{key}: weight and count are for training; an eval asks each prompt once. Set max_items instead."
            )
    sources = config.data.sources(for_eval=False)
    weighted = [key for key, source in sources if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        without = ", ".join(key for key, source in sources if source.weight is None)
        raise ConfigError(
            f"With a weight for {weighted[0]}, each source of the mix needs one: give {without} a weight."
        )
    if weighted and (counted := [key for key, source in sources if source.count is not None]):
        raise ConfigError(f"{counted[0]}: weight and count exclude each other. Mix by one of them.")


def _eval_data(config: Config) -> None:
    for name in config.data.eval_sets:
        if not _EVAL_SET.fullmatch(name):
            raise ConfigError(
                f"data.eval_sets has {name!r}: the name of a set is part of metrics and of paths, and must be letters, "
                f"digits, '_' and '-', with no digit or sign first. Choose another one."
            )
    for function in config.eval.metrics:
        if ":" not in function:
            raise ConfigError(
                f"eval.metrics has {function!r}: there are no built-in ones. Name a function of yours: "
                f"module:function or path/to/file.py:function."
            )
    if config.data.eval is not None and config.data.held_out is not None:
        raise ConfigError("data.eval and data.held_out exclude each other: set one of them to null.")


def _curriculum(config: Config) -> None:
    curriculum = config.data.curriculum
    if curriculum is None:
        return
    if not config.needs.rollouts:
        raise ConfigError(
            f"data.curriculum is set, but task {config.task} samples nothing to judge prompts by. Set it to null."
        )
    for key, source in config.data.sources(for_eval=False):
        if not config.rewards_of(source):
            raise ConfigError(
                f"data.curriculum judges prompts by rewards, and {key} has none. Name some, or set data.curriculum to "
                f"null."
            )
    if curriculum.hard_to is not None and curriculum.hard_to >= curriculum.easy_from:
        raise ConfigError(
            f"data.curriculum.hard_to = {curriculum.hard_to:g} must be less than data.curriculum.easy_from = "
            f"{curriculum.easy_from:g}: no prompt is both. Lower it, or set it to null."
        )


def _sequence_lengths(config: Config) -> None:
    if config.needs.rollouts and config.train.max_tokens_per_microbatch < config.max_model_len:
        raise ConfigError(
            f"train.max_tokens_per_microbatch = {config.train.max_tokens_per_microbatch} must hold the longest "
            f"sequence: data.max_prompt_tokens + rollout.max_new_tokens = {config.max_model_len}. "
            f"Raise it, or lower one of those two."
        )
    if config.rollout.min_new_tokens > config.rollout.max_new_tokens:
        raise ConfigError(
            f"rollout.min_new_tokens = {config.rollout.min_new_tokens} exceeds rollout.max_new_tokens = "
            f"{config.rollout.max_new_tokens}. Lower it, or raise rollout.max_new_tokens."
        )


def _engine_batch(config: Config) -> None:
    given, num_seqs = config.engine.max_num_batched_tokens, config.engine.max_num_seqs
    if config.needs.rollouts and given is not None and given < num_seqs:
        raise ConfigError(
            f"engine.max_num_batched_tokens = {given} must be at least engine.max_num_seqs = {num_seqs}: each request "
            f"that decodes takes one token of a step. Raise it, set it to null, or lower engine.max_num_seqs."
        )


def _attention(config: Config) -> None:
    if config.train.attention != "flash_attention_2":
        return
    if config.model.device == "cpu":
        raise ConfigError("train.attention = flash_attention_2 needs a GPU; with model.device = cpu choose sdpa.")
    if config.model.dtype == "float32":
        raise ConfigError(
            "train.attention = flash_attention_2 computes in 16 bits alone; with model.dtype = float32 choose sdpa."
        )


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
    if config.loss.denominator_tokens is not None and config.loss.denominator != "constant":
        raise ConfigError(
            f"loss.denominator_tokens = {config.loss.denominator_tokens} would have no effect: loss.denominator = "
            f"{config.loss.denominator} does not read it. Set it to null, or loss.denominator=constant."
        )
    if config.task == "ppo" and config.loss.advantage != "group":
        raise ConfigError(
            f"loss.advantage = {config.loss.advantage} would have no effect: task = ppo makes advantages in its "
            f"critic. Set loss.advantage=group, its default, or task=grpo."
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
        if config.distill.teacher is not None:
            raise ConfigError(
                f"distill.teacher = {config.distill.teacher} would have no effect: task = {config.task} has no "
                f"teacher. Set task=distill, or distill.teacher=null."
            )
        return
    _ = config.distill.required_teacher
    if config.loss.compares_advantages:
        raise ConfigError(
            f"loss.name = {config.loss.name} compares the advantages of an optimizer step before it, and the teacher "
            f"makes them in it. Choose another loss.name, such as grpo."
        )


_RULES = (
    _names,
    _run_name,
    _one_length,
    _nodes,
    _lag_and_minibatches,
    _mixes,
    _eval_data,
    _eval,
    _curriculum,
    _sequence_lengths,
    _engine_batch,
    _attention,
    _importance_weights,
    _keys_that_nothing_reads,
    _advantages,
    _proximal,
    _kl,
    _distillation,
)
"""In the order they are checked: names first, since other rules ask what the named algorithm needs."""
