"""AReaL's keys: those of 1.0.4 (areal/api/cli_args.py), and of its older versions back to 0.3 (realhf/api/cli_args.py).

Defaults are those of areal 1.0.4; those of 0.3 where a config has its sections. Formulas are those of
areal/trainer/ppo/actor.py and areal/utils/functional/functional.py. Longer than other files: the table of one system
is one file.
"""

from __future__ import annotations

from typing import Any

from hpc_grpo.foreign.allocation import allocation_values
from hpc_grpo.foreign.table import ByHandError, Differs, RefusedError, Row, Theirs, by_hand, choice, only, whole_groups

_MAX_NEW = ("gconfig.max_new_tokens", "ppo.gen.max_new_tokens")
_MINIBATCHES = ("actor.ppo_n_minibatches", "ppo.ppo_n_minibatches")
_NODES = ("n_nodes", "cluster.n_nodes")
_GPUS = ("n_gpus_per_node", "cluster.n_gpus_per_node")
_CAPS = ("actor.behave_imp_weight_cap", "actor.behav_imp_weight_cap", "ppo.behav_imp_weight_cap")
"""The cap of versions before 1.0: tokens above it are masked, and null caps nothing."""
_REJECTION = "actor.rejection_sampling"
_EVAL_FREQUENCIES = tuple(
    f"{prefix}freq_{unit}" for prefix in ("evaluator.", "exp_ctrl.eval_") for unit in ("epochs", "steps", "secs")
)
_DATA_SETS: dict[str, dict[str, Any]] = {"openai/gsm8k": {"subset": "main"}}
"""Data sets that AReaL's own loaders read -> our keys for their columns."""
_OWN = "AReaL's own processes: Ray and the run directory do this here"
_DTYPES = {"bfloat16": "bfloat16", "float32": "float32", "float16": RefusedError("float16 is not here: take bfloat16")}


def _is_0_3(theirs: Theirs) -> bool:
    return theirs.has("ppo.") or theirs.has("exp_ctrl.")


def _allocation(value: Any, theirs: Theirs) -> dict[str, Any]:
    """Read allocation_mode, or since 1.0 the backends of rollout and actor."""
    text = value or "+".join(str(theirs.get(f"{side}.backend", default="")) for side in ("rollout", "actor"))
    if text == "+":
        raise ByHandError("which GPUs sample and which train: give rollout.backend and actor.backend")
    shape = allocation_values(str(text), int(theirs.get(*_NODES)), int(theirs.get(*_GPUS)))
    return {**shape, "train.zero_stage": 3}  # which shards as FSDP does


def _name(value: Any, theirs: Theirs) -> str:
    return "-".join(str(part) for part in (value, theirs.get("trial_name")) if part)


def _lag(value: Any, theirs: Theirs) -> Any:
    """AReaL counts batches, we count optimizer steps."""
    is_async = theirs.get("async_training")
    return int(value) * int(theirs.get(*_MINIBATCHES)) if is_async else 0


def _length(value: Any, theirs: Theirs) -> dict[str, Any]:
    """Take the number of steps rather than that of epochs: each run here has one length."""
    steps = theirs.get("total_train_steps", "exp_ctrl.total_train_steps")
    return {"train.total_steps": int(steps)} if steps else {"train.total_epochs": int(value)}


def _warmup(value: Any, theirs: Theirs) -> Any:
    steps = theirs.get("total_train_steps", "exp_ctrl.total_train_steps")
    if value and not steps:
        if value <= 0.01:
            return Differs(0, f"{value:g} of the run's steps: none of fewer than {round(1 / value)}")
        raise ByHandError(
            f"{value:g} of the steps of the run, whose number only the data tells: set train.warmup_steps"
        )
    return int(float(value or 0) * int(steps or 0)) * int(theirs.get(*_MINIBATCHES))


def _schedule(value: Any, theirs: Theirs) -> Any:
    chosen = choice({name: name for name in ("constant", "linear", "cosine")}, "learning-rate schedule")(value, theirs)
    end = theirs.get("actor.optimizer.min_lr_ratio")
    if end and chosen != "constant":
        return Differs(chosen, f"down to {end:g} of lr there, down to 0 here")
    return chosen


def _microbatch(value: Any, theirs: Theirs) -> Any:
    longest = _longest_prompt(None, theirs) + int(theirs.get(*_MAX_NEW))
    if value is None:
        return Differs(max(longest, 8192), "unbounded there")
    return int(value) if int(value) >= longest else Differs(longest, "at least one whole sequence")


def _longest_prompt(value: Any, theirs: Theirs) -> int:
    """Bound a prompt as AReaL does, or else by what the engine's longest sequence leaves for one."""
    if value is None:
        value = theirs.get("train_dataset.max_length", "dataset.max_prompt_len")
    if value is None:
        whole = int(theirs.get("vllm.max_model_len", "sglang.context_length", "actor.sglang.context_length"))
        value = max(1, whole - int(theirs.get(*_MAX_NEW)))
    return int(value)


def _max_prompt(value: Any, theirs: Theirs) -> dict[str, Any]:
    """AReaL's loaders leave longer prompts out."""
    ours = {"data.max_prompt_tokens": _longest_prompt(value, theirs)}
    return {**ours, "data.drop_long_prompts": True} if value is not None else ours


def _whole(value: Any, theirs: Theirs) -> dict[str, Any]:
    longest = _longest_prompt(None, theirs) + int(theirs.get(*_MAX_NEW))
    if int(value) < longest:
        raise RefusedError(
            f"prompt and completion together have at most {value} tokens there; here each has its own bound, "
            f"{longest} in all. Lower gconfig.max_new_tokens"
        )
    return {}


def _group(value: Any, _theirs: Theirs) -> int:
    if int(value) < 2:
        raise RefusedError("a group has at least two completions here, which are compared", {"rollout.group_size": 2})
    return int(value)


def _loss(value: Any, theirs: Theirs) -> dict[str, Any]:
    """Choose loss, proximal logprobs and correction by AReaL's switches.

    Decoupled, the ratio is to the learner at the start of the step; else to recomputed logprobs, or to the engine's.
    """
    by_sequence = theirs.get("actor.importance_sampling_level") == "sequence"
    ours: dict[str, Any] = {"loss.denominator": "tokens"}
    if not value:
        is_recomputed = theirs.get("actor.recompute_logprob", "ppo.recompute_logprob")
        ours |= {"loss.correction.name": "none", "loss.proximal": "recomputed" if is_recomputed else "engine"}
    else:
        ours |= _correction(theirs)
        method = theirs.get("actor.prox_logp_method")
        ours["loss.proximal"] = choice(
            {"recompute": "recomputed", "metrics": "recomputed", "loglinear": "interpolated"}, "proximal logprobs by"
        )(method, theirs)
    if theirs.get("actor.use_sapo_loss"):
        ours |= {"loss.name": "sapo"} | {
            f"loss.temperature_{side}": float(theirs.get(f"actor.sapo_tau_{short}"))
            for side, short in (("positive", "pos"), ("negative", "neg"))
        }
        if value or by_sequence:
            raise RefusedError("sapo goes with use_decoupled_loss false and a ratio for each token alone", ours)
        return ours
    low = float(theirs.get("actor.eps_clip", "ppo.eps_clip"))
    clip = theirs.get("actor.c_clip", "ppo.c_clip")
    ours |= {
        "loss.name": "gspo" if by_sequence else "decoupled_ppo" if value else "grpo",
        "loss.clip_low": low,
        "loss.clip_high": float(theirs.get("actor.eps_clip_higher", default=low)),
        "loss.dual_clip": None if clip is None else float(clip),
    }
    if (threshold := theirs.get("actor.m2_threshold")) is not None:
        m2po = {"loss.correction.name": "m2po", "loss.correction.cap": float(threshold)}
        without = {key: own for key, own in ours.items() if not key.startswith("loss.correction")}
        raise RefusedError(
            "m2_threshold masks in each microbatch, divides by what is left, and weighs by rejection_sampling there; "
            "loss.correction = m2po masks in the optimizer step, and weighs what is left by learner / engine",
            without | m2po,
        )
    return ours


def _correction(theirs: Theirs) -> dict[str, Any]:
    """Weigh by w = proximal / engine. Since 1.0 there is no weight without rejection_sampling; before, always one."""
    none = {"loss.correction.name": "none"}
    older = [theirs.exact(name) for name in _CAPS if theirs.is_given(name)]
    mode = theirs.get("actor.behave_imp_weight_mode")
    if mode not in (None, "token_mask", "disabled"):
        raise RefusedError("the cap on the weight masks tokens here (behave_imp_weight_mode: token_mask)", none)
    if mode == "disabled":
        return none
    if older or _is_0_3(theirs) or mode:
        return _masked(0.0, older[0] if older else None if _is_0_3(theirs) else 5.0)
    if not theirs.has(_REJECTION):
        return none
    level, action, metric, upper, lower = (
        theirs.get(f"{_REJECTION}.{key}") for key in ("level", "action", "metric", "upper", "lower")
    )
    masked = _masked(float(lower or 0.0), upper)
    if (level, metric) != ("token", "ratio") or (action == "clamp" and lower):
        raise RefusedError(
            f"rejection_sampling by {level}, {metric}, {action} is not here: a sequence is weighed by the mean of its "
            f"log ratios there; loss.correction has icepop (token, ratio, mask) and truncated (clamp without lower)",
            masked,
        )
    return masked if action == "mask" else {"loss.correction.name": "truncated", "loss.correction.cap": float(upper)}


def _masked(low: float, cap: Any) -> dict[str, Any]:
    return {"loss.correction.name": "icepop", "loss.correction.low": low,
            "loss.correction.cap": float(cap) if cap else 1e9}  # fmt: skip


_NORMS = ("actor.reward_norm", "actor.adv_norm")
_RAW = "A = r, without a baseline there; here r - mean of its group"
_TOKENS = "(r - mean) / (deviation + 1e-5) over all tokens of the batch there; over its completions here"


def _norm(theirs: Theirs, norm: str) -> dict[str, Any] | None:
    """Return the settings of one of the two norms; None where it is off."""
    if not theirs.has(f"{norm}."):
        return None
    defaults = {"mean_level": "batch", "std_level": "batch", "mean_leave1out": False, "std_unbiased": True, "eps": 1e-5}
    return {
        key: theirs.exact(name) if theirs.is_given(name := f"{norm}.{key}") else own for key, own in defaults.items()
    }


def _advantage(_value: Any, theirs: Theirs) -> Any:
    """Choose by the norms of rewards and of advantages; AReaL before those had one of the batch, or of groups."""
    reward, advantage = (_norm(theirs, norm) for norm in _NORMS)
    if reward is None and advantage is None:
        older = ("actor.group_adv_norm", "group_adv_norm", "ppo.adv_norm")
        if not _is_0_3(theirs) and not any(map(theirs.is_given, older)):
            raise RefusedError(f"neither reward_norm nor adv_norm: {_RAW}. Set one of them", {
                "loss.advantage.name": "group", "loss.advantage.normalize_std": False})  # fmt: skip
        by_group = theirs.get("actor.group_adv_norm", "group_adv_norm")
        if theirs.exact("ppo.adv_norm") is False:
            raise RefusedError(f"ppo.adv_norm false: {_RAW}", {
                "loss.advantage.name": "group", "loss.advantage.normalize_std": False})  # fmt: skip
        return Differs({"loss.advantage.name": "group" if by_group else "reinforce_pp"}, _TOKENS)
    if reward is None or advantage is None:
        return _one_norm(reward or advantage or {}, is_of_tokens=reward is None)
    ours, note = (
        _one_norm(reward, is_of_tokens=False),
        "b = norm of rewards, A = (b - mean(b)) / deviation(b) over tokens",
    )
    return Differs(ours.ours if isinstance(ours, Differs) else ours, f"{note} there; A = b here")


def _one_norm(norm: dict[str, Any], *, is_of_tokens: bool) -> Any:
    mean, std, leaves_one_out = norm["mean_level"], norm["std_level"], norm["mean_leave1out"]
    if mean not in ("group", "batch") or (std == "group" and mean == "batch"):
        raise RefusedError(f"a mean by {mean} with a deviation by {std} is not here", {"loss.advantage.name": "group"})
    if leaves_one_out and (mean, std) != ("group", None):
        raise RefusedError(
            "leave-one-out goes without a deviation here (std_level: null)", {"loss.advantage.name": "rloo"}
        )
    if mean == "batch":
        return Differs(
            {"loss.advantage.name": "reinforce_pp", "loss.advantage.normalize_std": std is not None}, _TOKENS
        )
    if leaves_one_out:
        return {"loss.advantage.name": "rloo"}
    if std == "batch":
        note = "deviation of b = r - mean of its group, + 1e-5 there; of the raw rewards, + 1e-4 here"
        return Differs({"loss.advantage.name": "group_step_std"}, _TOKENS if is_of_tokens else note)
    ours: dict[str, Any] = {"loss.advantage.name": "group", "loss.advantage.normalize_std": std == "group"}
    if std == "group":
        ours |= {"loss.advantage.unbiased_std": bool(norm["std_unbiased"]), "loss.advantage.eps": float(norm["eps"])}
    if is_of_tokens:
        return Differs(ours, "a group's mean and deviation are over its tokens there, over its completions here")
    return ours


def _reward_scale(value: Any, theirs: Theirs) -> Any:
    """Weigh the reward where its scale reaches the gradient: advantages that nothing divides, or a KL beside it."""
    if value is None or float(value) == 1.0:
        return {}
    scaled = [norm for norm in (_norm(theirs, name) for name in _NORMS) if norm and norm["std_level"]]
    is_divided = bool(scaled) or not any(_norm(theirs, norm) for norm in _NORMS)
    if is_divided and not theirs.get("actor.kl_ctl", "ppo.kl_ctl"):
        return {}
    return Differs({"rewards": [{"name": "correctness", "weight": float(value)}]}, "the weight of the reward, which "
                   "clips nothing; (r + bias) * scale within +-reward_clip there")  # fmt: skip


def _kl(value: Any, theirs: Theirs) -> Any:
    if not value:
        return {"loss.kl.coef": 0.0}
    ours = {
        "loss.kl.coef": float(value),
        "loss.kl.where": "reward",
        "loss.kl.estimator": theirs.get("actor.kl_estimator"),
    }
    if not _is_0_3(theirs) and not theirs.has("ref."):
        raise RefusedError(
            f"kl_ctl = {value} without a section ref: AReaL then takes 0 for the reference's logprobs, and rewards "
            f"lose kl_ctl * log p. Set kl_ctl 0, or give ref", {"loss.kl.coef": 0.0})  # fmt: skip
    reference = theirs.get("ref.path")
    if reference not in (None, theirs.get("actor.path")):
        ours["loss.kl.reference"] = reference
    return Differs(ours, "each token loses coef * the KL from it on, before the norm of advantages there, after it "
                   "here; decoupled, of the engine's logprobs there, of the learner's here")  # fmt: skip


def _critic(value: Any, theirs: Theirs) -> dict[str, Any]:
    """Refuse a critic: a section `critic` since 1.0; in 0.3 there is one unless ppo.disable_value is true."""
    has_critic = not theirs.get("ppo.disable_value") if theirs.has("ppo.") else theirs.has("critic.") or bool(value)
    if has_critic:
        reason = "a critic trains beside the policy: that is task: ppo, and this table is for algorithms without one"
        raise RefusedError(f"{reason}. Leave the section critic out, or in 0.3 set ppo.disable_value true")
    return {}


def _train_data(value: Any, _theirs: Theirs) -> Any:
    columns = _DATA_SETS.get(str(value), {})
    ours = {"data.train.path": value, **{f"data.train.{key}": own for key, own in columns.items()}}
    return Differs(ours, "the reward is in AReaL's script: rewards.0.name is correctness here")


def _eval_data(value: Any, theirs: Theirs) -> dict[str, Any]:
    if not value or not any(theirs.get(name) for name in _EVAL_FREQUENCIES):
        return {}
    columns = {**_DATA_SETS.get(str(value), {}), "split": theirs.get("valid_dataset.split")}
    return {"data.eval.path": value, **{f"data.eval.{key}": own for key, own in columns.items()}}


def _eval_every(value: Any, theirs: Theirs) -> Any:
    return value if theirs.get("valid_dataset.path") else None


def _overlong(value: Any, theirs: Theirs) -> int | None:
    if not value:
        return None
    tokens, factor = (theirs.get(f"actor.overlong_{key}") for key in ("tokens", "penalty_factor"))
    if factor is None or float(factor) != 1.0:
        raise RefusedError(f"the penalty of an overlong completion is at most 1 here, {factor} there", {
            "rollout.overlong_tokens": int(tokens)})  # fmt: skip
    return int(tokens)


def _model_only(value: Any, theirs: Theirs) -> dict[str, Any]:
    if value not in (None, "", theirs.get("actor.path")):
        raise RefusedError("the tokenizer is that of model.path here")
    return {}


def _no_eos(value: Any, _theirs: Theirs) -> dict[str, Any]:
    if value:
        raise RefusedError("a completion without its end keeps its tokens with the reward 0 there; here "
                           "rollout.mask_truncated gives it no gradient", {"rollout.mask_truncated": True})  # fmt: skip
    return {}


def _sections(prefix: str, names: str) -> str:
    return " ".join(f"{prefix}.{name}" for name in names.split())


_ENGINE_OF_TRAINING = (
    "experiment_name trial_name attn_impl use_kernels is_critic temperature mb_spec.n_mbs mb_spec.granularity "
    "mb_spec.n_mbs_divisor mb_spec.packing_algorithm pad_to_maximum disable_dropout grad_reduce_dtype optimizer_dtype "
    "weight_update_mode fsdp fsdp.* archon.* megatron megatron.* offload enable_tree_training scheduling_spec* "
    "log_level request_timeout setup_timeout scheduling_strategy* log_agent_stats* max_new_tokens type.* sglang.* "
    "vllm.* reward_norm reward_norm.group_size adv_norm adv_norm.group_size group_size use_decoupled_loss_*"
)

ROWS = (
    Row("experiment_name", "run.name", _name, default="areal", also={"trial_name": None}),
    Row("cluster.fileroot", "run.root", default="/tmp/areal/", note="the run is fileroot/NAME, with all of it inside"),
    Row("seed", "run.seed", default=1),
    Row("total_train_epochs exp_ctrl.total_train_epochs", convert=_length, default=1,
        also={"total_train_steps": None, "exp_ctrl.total_train_steps": None}),
    Row("total_train_n_seqs", convert=only(why="a run's length is train.total_steps, total_episodes or total_epochs")),
    Row("mode", note="where it runs is the command: train here, submit on Slurm"),
    Row("recover_mode recover.mode", note="a run always resumes by the same command; another run.name starts anew"),
    Row("recover_retries recover_after recover.retries", note="launch.max_stalled_restarts bounds restarts"),
    Row("recover.no_save_optim recover.no_load_optim", convert=only(False, why="a checkpoint has the optimizer")),
    Row("allocation_mode", convert=_allocation, default="",
        also={"rollout.backend": None, "actor.backend": None, "n_nodes": None, "cluster.n_nodes": 32,
              "n_gpus_per_node": None, "cluster.n_gpus_per_node": 8}),
    Row("rollout.max_head_offpolicyness max_head_offpolicyness", "rollout.max_policy_lag", _lag, default=0,
        also={"async_training": True}),
    Row("dynamic_bs", convert=only(False, why="a step has rollout.prompts_per_step groups")),
    Row("rollout.use_lora actor.use_lora vllm.enable_lora sglang.enable_lora",
        convert=only(False, why="LoRA is not here: all weights learn")),
    Row("*lora* actor.peft_type actor.target_modules", note="of LoRA"),
    Row("teacher", convert=only(why="a teacher is task: distill")),
    Row("teacher.*", convert=only(why="a teacher is task: distill")),
    Row("gconfig.n_samples group_size", "rollout.group_size", _group, default=1),
    Row("gconfig.max_new_tokens ppo.gen.max_new_tokens", "rollout.max_new_tokens", default=16384),
    Row("gconfig.min_new_tokens ppo.gen.min_new_tokens", "rollout.min_new_tokens", default=0),
    Row("gconfig.temperature ppo.gen.temperature", "rollout.temperature", default=1.0),
    Row("gconfig.top_p ppo.gen.top_p", "rollout.top_p", default=1.0),
    Row("gconfig.top_k ppo.gen.top_k", convert=only(-1, 10**6, 10**8, why="top-k sampling is not here: use top_p")),
    Row("gconfig.greedy ppo.gen.greedy", convert=only(False, why="a group of greedy completions has no advantages")),
    Row("gconfig.use_beam_search gconfig.ignore_eos",
        convert=only(False, why="completions are sampled up to the end token")),
    Row("gconfig.stop gconfig.stop_token_ids", convert=by_hand("completions end with the end token alone")),
    Row("gconfig.frequency_penalty", convert=only(0, 0.0, why="sampling has no frequency penalty")),
    Row("gconfig.max_tokens", convert=_whole, default=32768),
    Row("gconfig.skip_special_tokens ppo.gen.n", note="part of sampling that only AReaL's workflows read"),
    Row("eval_gconfig.n_samples", "eval.num_samples"),
    Row("eval_gconfig.temperature", "eval.temperature"),
    Row("eval_gconfig.top_p", "eval.top_p"),
    Row("eval_gconfig", note="as gconfig"),
    Row("eval_gconfig.*", note="as gconfig: rollout.max_new_tokens"),
    Row("actor.path", "model.path"),
    Row("tokenizer_path", convert=_model_only),
    Row("actor.init_from_scratch", convert=only(False, why="a policy begins with weights")),
    Row("actor.dtype", "model.dtype", choice(_DTYPES, "dtype"), default="bfloat16"),
    Row("actor.bf16 ref.bf16", note="model.dtype: bfloat16 here; float16 is not"),
    Row("actor.gradient_checkpointing", "train.gradient_checkpointing", default=False),
    Row("actor.mb_spec.max_tokens_per_mb actor_train.mb_spec.max_tokens_per_mb", "train.max_tokens_per_microbatch",
        _microbatch, default=None),
    Row("actor.optimizer", convert=only(why="the optimizer has a section")),
    Row("actor.optimizer.type", convert=only("adam", "adamw", why="learners have AdamW alone")),
    Row("actor.optimizer.lr", "train.lr", default=1e-3),
    Row("actor.optimizer.weight_decay", "train.weight_decay", default=0.01,
        note="on all weights there; on matrices alone here"),
    Row("actor.optimizer.beta1", "train.betas", lambda value, theirs: [value, theirs.get("actor.optimizer.beta2")],
        default=0.9, also={"actor.optimizer.beta2": 0.999}),
    Row("actor.optimizer.eps", "train.eps", default=1e-8),
    Row("actor.optimizer.gradient_clipping", "train.max_grad_norm", default=1.0),
    Row("actor.optimizer.lr_scheduler_type", "train.schedule", _schedule, default="constant",
        also={"actor.optimizer.min_lr_ratio": 0.0}),
    Row("actor.optimizer.warmup_steps_proportion", "train.warmup_steps", _warmup, default=0.001),
    Row(_sections("actor.optimizer", "initial_loss_scale min_loss_scale loss_scale_window hysteresis offload"),
        note="of mixed precision in float16, or of the host's memory"),
    Row("actor.use_decoupled_loss ppo.use_decoupled_loss", convert=_loss, default=False,
        also={"actor.recompute_logprob": False, "ppo.recompute_logprob": None, "actor.eps_clip": 0.2,
              "ppo.eps_clip": None, "actor.eps_clip_higher": None, "actor.c_clip": None, "ppo.c_clip": None,
              "actor.use_sapo_loss": False, "actor.sapo_tau_pos": 1.0, "actor.sapo_tau_neg": 1.05,
              "actor.importance_sampling_level": "token", "actor.prox_logp_method": "recompute",
              "actor.m2_threshold": None, "actor.behave_imp_weight_mode": None, **dict.fromkeys(_CAPS),
              _REJECTION: None, f"{_REJECTION}.level": "token", f"{_REJECTION}.action": "mask",
              f"{_REJECTION}.metric": "ratio", f"{_REJECTION}.upper": 5.0,
              f"{_REJECTION}.lower": None}),
    Row(f"{_REJECTION}.agg", note="of level sequence, which is refused"),
    Row("critic ppo.disable_value", convert=_critic, default=None, also={"critic.path": None}),
    Row("critic.* ppo.value_eps_clip ppo.critic_sample_reuse ppo.fuse_rew_ref", note="of a critic, which is refused"),
    Row("actor.kl_ctl ppo.kl_ctl", convert=_kl, default=0.1, also={"actor.kl_estimator": "k1", "ref.path": None}),
    Row("ppo.use_adaptive_kl_ctl", convert=only(False, why="the KL's weight stays as it is")),
    Row("actor.ppo_n_minibatches ppo.ppo_n_minibatches", "train.num_minibatches",
        lambda value, _: whole_groups(value, "completions, balanced by tokens,"), default=4),
    Row("actor.reward_norm.mean_level", convert=_advantage, default=None,
        also={f"{norm}.{key}": None for norm in _NORMS for key in (
            "mean_level", "std_level", "mean_leave1out", "std_unbiased", "eps")}
        | dict.fromkeys(("actor.group_adv_norm", "group_adv_norm", "ppo.adv_norm"))),
    Row("actor.reward_scaling ppo.reward_output_scaling", convert=_reward_scale, default=1.0),
    Row("actor.reward_bias ppo.reward_output_bias", note="cancels in advantages that are centred, as these are"),
    Row("actor.reward_clip ppo.max_reward_clip", note="rewards here are bounded by their functions"),
    Row("actor.discount actor.gae_lambda ppo.discount ppo.gae_lambda",
        convert=only(1, 1.0, why="without a critic each token has the whole reward of its sequence")),
    Row("ppo.actor_sample_reuse", convert=only(1, why="each rollout is trained on once")),
    Row("ppo.early_stop_imp_ratio", convert=only(why="no minibatch is skipped for its ratio: policy/ratio_mean shows "
        "it")),
    Row("actor.dynamic_sampling", "rollout.drop_zero_variance"),
    Row("actor.overlong_reward_penalty", "rollout.overlong_tokens", _overlong, default=False,
        also={"actor.overlong_tokens": None, "actor.overlong_penalty_factor": None}),
    Row("actor.mask_no_eos_with_zero", convert=_no_eos),
    Row("mask_too_long", "rollout.mask_truncated"),
    Row(_sections("actor", _ENGINE_OF_TRAINING),
        note="of AReaL's engines; here as sampling says, without dropout, with weights through shared memory"),
    Row("ref", note="without kl_ctl nothing reads a reference"),
    Row("ref.* ref_inf.* actor_inf.* actor_train.*", note="the reference is computed as the policy is"),
    Row("vllm.dtype", "engine.dtype", choice(_DTYPES, "dtype of the engine"), default="bfloat16"),
    Row("vllm.gpu_memory_utilization", "engine.gpu_memory_utilization", default=0.9),
    Row("vllm.enforce_eager", "engine.enforce_eager", default=False),
    Row("vllm.max_num_seqs", "engine.max_num_seqs", default=256),
    Row("vllm.no_enable_prefix_caching", "engine.prefix_caching", lambda value, _: not value, default=True),
    Row("train_dataset.max_length dataset.max_prompt_len", convert=_max_prompt, default=None,
        also={"sglang.context_length": 32768, "vllm.max_model_len": 32768, "actor.sglang.context_length": None}),
    Row("vllm.* sglang.*", note="of AReaL's server; engine.* has what vLLM needs"),
    Row("train_dataset.path dataset.path", convert=_train_data),
    Row("train_dataset.batch_size dataset.train_bs_n_seqs", "rollout.prompts_per_step", default=1),
    Row("train_dataset.shuffle shuffle_dataset", "data.shuffle", default=True),
    Row("train_dataset.split", "data.train.split", default="train"),
    Row("valid_dataset.path", convert=_eval_data, also={"valid_dataset.split": "test"}),
    Row("valid_dataset", note="no eval without a data set for it"),
    Row("train_dataset.* valid_dataset.* dataset.*", note="of AReaL's data loader"),
    *(
        Row(f"{theirs}freq_{unit} exp_ctrl.{older}_freq_{unit}", f"{ours}_{our_unit}", convert, default=None)
        for theirs, older, ours, convert in (
            ("saver.", "save", "checkpoint.export_every", None),
            ("recover.", "ckpt", "checkpoint.every", None),
            ("evaluator.", "eval", "eval.every", _eval_every),
        )
        for unit, our_unit in (("epochs", "epochs"), ("steps", "steps"), ("secs", "s"))
    ),
    Row("stats_logger.wandb.mode wandb.mode", "metrics.wandb_mode",
        choice({"disabled": "disabled", "offline": "offline", "online": "auto", True: "auto"}, "W&B"),
        default="disabled"),
    Row("stats_logger.wandb.project wandb.project", "metrics.wandb_project", lambda value, _: value or "hpc-grpo"),
    Row("stats_logger.wandb.entity wandb.entity", "metrics.wandb_entity"),
    Row("stats_logger.tensorboard.path tensorboard.path", "metrics.tensorboard", lambda value, _: bool(value),
        default=None),
    Row("success_rate_ub success_rate_lb",
        convert=only(1.0, 0.0, why="set data.curriculum, or rollout.drop_zero_variance")),
    Row("rollout.max_concurrent_rollouts max_concurrent_rollouts rollout.* n_rollout_workers flush_request_timeout",
        note="engines are kept full by themselves: engine.max_num_seqs, rollout.max_policy_lag"),
    Row("evaluator.eval_before_train", note="with an eval there is one before training, too"),
    Row("stats_logger.* wandb.* launcher.* scheduler.* perf_tracer* memory_profiler* saver.* recover.* evaluator.* "
        "checkpointer.* cluster.* exp_ctrl.* enable_offload torch_cache_mysophobia cache_clear_freq ray_temp_path "
        "rw_type metric_discovery_port cpus_per_* mem_per_*", note=_OWN),
)  # fmt: skip
