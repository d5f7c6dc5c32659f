"""AReaL's keys: those of its examples today (areal/api/cli_args.py), and of version 0.3 (realhf/api/cli_args.py).

Longer than other files: the table of one system is one file.
"""

from __future__ import annotations

from typing import Any

from hpc_grpo.config.foreign.allocation import allocation_values
from hpc_grpo.config.foreign.table import ByHandError, RefusedError, Row, Theirs, by_hand, choice, elsewhere, only

_MAX_NEW = ("gconfig.max_new_tokens", "ppo.gen.max_new_tokens")
_MINIBATCHES = ("actor.ppo_n_minibatches", "ppo.ppo_n_minibatches")
_BATCH = ("train_dataset.batch_size", "dataset.train_bs_n_seqs")
_NODES = ("n_nodes", "cluster.n_nodes")
_GPUS = ("n_gpus_per_node", "cluster.n_gpus_per_node")
_CAPS = ("actor.behave_imp_weight_cap", "actor.behav_imp_weight_cap", "ppo.behav_imp_weight_cap")
_CAP = 5.0
"""AReaL's own where none of these is given; null there is no cap."""
_EVAL_FREQUENCIES = tuple(
    f"{prefix}freq_{unit}" for prefix in ("evaluator.", "exp_ctrl.eval_") for unit in ("epochs", "steps", "secs")
)
_DATA_SETS: dict[str, dict[str, Any]] = {"openai/gsm8k": {"subset": "main"}}
"""Data sets that AReaL's own loaders read -> our keys for their columns."""

_KEPT = "the inputs are the run's own"
_OWN = "AReaL's own processes: Ray and the run directory do this here"


def _allocation(value: Any, theirs: Theirs) -> dict[str, Any]:
    return allocation_values(str(value), int(theirs.get(*_NODES, default=1)), int(theirs.get(*_GPUS, default=8)))


def _name(value: Any, theirs: Theirs) -> str:
    return "-".join(str(part) for part in (value, theirs.get("trial_name")) if part)


def _lag(value: Any, theirs: Theirs) -> int:
    """AReaL counts batches, we count optimizer steps."""
    is_async = theirs.get("async_training", default=True)
    return int(value) * int(theirs.get(*_MINIBATCHES, default=1)) if is_async else 0


def _length(value: Any, theirs: Theirs) -> dict[str, Any]:
    """Take the number of steps rather than that of epochs: each run here has one length."""
    steps = theirs.get("total_train_steps", "exp_ctrl.total_train_steps")
    return {"train.total_steps": int(steps)} if steps else {"train.total_epochs": int(value)}


def _warmup(value: Any, theirs: Theirs) -> int:
    steps = theirs.get("total_train_steps")
    if value and not steps:
        if value <= 0.01:  # of fewer than a hundred steps: none
            return 0
        raise ByHandError(
            f"{value:g} of the steps of the run, whose number only the data tells: set train.warmup_steps"
        )
    return int(float(value or 0) * int(steps or 0)) * int(theirs.get(*_MINIBATCHES))


def _microbatch(value: Any, theirs: Theirs) -> int:
    return max(int(value or 0), _max_prompt(None, theirs) + int(theirs.get(*_MAX_NEW, default=0)))


def _max_prompt(value: Any, theirs: Theirs) -> int:
    """Bound a prompt as AReaL does, or else by what the engine's longest sequence leaves for one."""
    if value is None:
        value = theirs.get("train_dataset.max_length", "dataset.max_prompt_len")
    if value is None:
        whole = theirs.get("vllm.max_model_len", "sglang.context_length", "actor.sglang.context_length")
        value = int(whole) - int(theirs.get(*_MAX_NEW, default=0)) if whole else 1024
    return int(value)


def _group(value: Any, _theirs: Theirs) -> int:
    if int(value) < 2:
        raise RefusedError("a group has at least two completions here, which are compared", rollout__group_size=2)
    return int(value)


def _loss(value: Any, theirs: Theirs) -> dict[str, Any]:
    """Choose the loss by AReaL's switches. Only a decoupled loss corrects for the engine, unless its weight is off."""
    if theirs.get("actor.use_sapo_loss"):
        taus = [theirs.get("actor.sapo_tau_pos", default=1.0), theirs.get("actor.sapo_tau_neg", default=1.05)]
        return {"loss.name": "sapo", "loss.denominator": "tokens", "loss.gate_temperatures": taus}
    low = theirs.get("actor.eps_clip", "ppo.eps_clip")
    high = theirs.get("actor.eps_clip_higher", default=low)
    clip = {"loss.clip_low": low, "loss.clip_high": high, "loss.denominator": "tokens"}
    is_gspo = theirs.get("actor.importance_sampling_level") == "sequence"
    if not value or theirs.get("actor.behave_imp_weight_mode") == "disabled":
        return {"loss.name": "gspo" if is_gspo else "grpo", **clip, "loss.importance_correction": "none"}
    capped = [theirs.given[name] for name in _CAPS if name in theirs.given] or [_CAP]
    weight = {
        "loss.importance_correction": "icepop",
        "loss.importance_low": 0.0,
        "loss.importance_cap": capped[0] or 1e9,
    }
    return {"loss.name": "gspo" if is_gspo else "decoupled_ppo", **clip, **weight}


def _advantage(value: Any, theirs: Theirs) -> dict[str, Any]:
    """Choose by the levels of reward_norm and adv_norm; AReaL before those had a batch norm, by group on request."""
    norms = [
        norm
        for norm in ("actor.reward_norm", "actor.adv_norm")
        if any(key.startswith(f"{norm}.") for key in theirs.given)
    ]
    if not norms:  # the older keys
        by_group = theirs.get("actor.group_adv_norm", "group_adv_norm")
        return {"loss.advantage": "group"} if by_group else {"loss.advantage": "reinforce_pp"}
    means, stds = ([theirs.given.get(f"{norm}.{key}_level", "batch") for norm in norms] for key in ("mean", "std"))
    if "group" not in means:
        return {"loss.advantage": "reinforce_pp"}
    if "group" in stds:
        return {"loss.advantage": "group", "loss.normalize_std": True}
    if "batch" in stds:
        return {"loss.advantage": "reinforce_pp_baseline"}
    if any(theirs.get(f"{norm}.mean_leave1out") for norm in norms):
        return {"loss.advantage": "rloo"}
    return {"loss.advantage": "group", "loss.normalize_std": False}


def _reward_scale(value: Any, theirs: Theirs) -> dict[str, Any]:
    """Weigh the reward where its scale reaches the gradient: advantages that nothing divides, or a KL beside it."""
    chosen = _advantage(None, theirs)
    is_divided = chosen["loss.advantage"] != "rloo" and chosen.get("loss.normalize_std", True)
    if is_divided and not theirs.get("actor.kl_ctl", "ppo.kl_ctl"):
        return {}
    return {"rewards": [{"name": "correctness", "weight": float(value)}]}


def _kl(value: Any, theirs: Theirs) -> dict[str, Any]:
    if not value:
        return {"loss.kl_coef": 0.0}
    estimator = theirs.get("actor.kl_estimator", default="k1")
    return {"loss.kl_coef": float(value), "loss.kl_in": "reward", "loss.kl_estimator": estimator}


def _train_data(value: Any, _theirs: Theirs) -> dict[str, Any]:
    columns = _DATA_SETS.get(str(value), {})
    return {"data.train.path": value, **{f"data.train.{key}": ours for key, ours in columns.items()}}


def _eval_data(value: Any, theirs: Theirs) -> dict[str, Any]:
    if not value or not any(theirs.get(name) for name in _EVAL_FREQUENCIES):
        return {}
    columns = {**_DATA_SETS.get(str(value), {}), "split": "test"}
    return {"data.eval.path": value, **{f"data.eval.{key}": ours for key, ours in columns.items()}}


def _eval_every(value: Any, theirs: Theirs) -> Any:
    return value if theirs.get("valid_dataset.path") else None


def _overlong(value: Any, theirs: Theirs) -> int | None:
    if not theirs.get("actor.overlong_reward_penalty"):
        return None
    if theirs.get("actor.overlong_penalty_factor", default=1.0) != 1.0:
        raise RefusedError(
            "the penalty of an overlong completion is at most 1 here", rollout__overlong_tokens=int(value)
        )
    return int(value)


def _same_model(value: Any, theirs: Theirs) -> dict[str, Any]:
    if value is not None and value != theirs.get("actor.path"):
        raise RefusedError("the reference and the tokenizer are those of model.path here")
    return {}


_DTYPES = {"bfloat16": "bfloat16", "float32": "float32", "float16": RefusedError("float16 is not here: take bfloat16")}
_KL_NOTE = "AReaL has it in the rewards; the reference is model.path as it was"

ROWS = (
    Row("experiment_name", "run.name", _name, default="areal"),
    Row("trial_name", convert=elsewhere, note="part of run.name"),
    Row("cluster.fileroot", "run.root", note="the run is fileroot/NAME, with all of it inside"),
    Row("seed", "run.seed"),
    Row("total_train_epochs exp_ctrl.total_train_epochs", convert=_length, default=1),
    Row("total_train_steps", convert=elsewhere, note="with a value, it is the length instead of the epochs"),
    Row("mode", note="where it runs is the command: train here, submit on Slurm"),
    Row("recover_mode recover.mode", note="a run always resumes by the same command; another run.name starts anew"),
    Row("recover_retries recover_after recover.retries", note="launch.max_stalled_restarts bounds restarts"),
    Row("allocation_mode", convert=_allocation),
    Row("n_nodes cluster.n_nodes n_gpus_per_node cluster.n_gpus_per_node", convert=elsewhere,
        note="checked against allocation_mode"),
    Row("async_training", convert=elsewhere, note="with max_head_offpolicyness"),
    Row(
        "rollout.max_head_offpolicyness max_head_offpolicyness", "rollout.max_policy_lag", _lag, default=0,
        note="AReaL counts batches, here optimizer steps are counted; older rollouts are never trained on",
    ),
    Row("rollout.dump_to_file", note="rollouts are always written: rollout.logged_fraction"),
    Row("rollout.use_lora actor.use_lora vllm.enable_lora",
        convert=only(False, why="LoRA is not here: all weights learn")),
    Row("*lora* actor.peft_type actor.target_modules", note="of LoRA"),
    Row(
        "rollout.max_concurrent_rollouts max_concurrent_rollouts rollout.queue_size rollout.consumer_batch_size "
        "n_rollout_workers flush_request_timeout rollout.enable_rollout_tracing rollout.*",
        note="engines are kept full by themselves: engine.max_num_seqs, rollout.max_policy_lag",
    ),
    Row("gconfig.n_samples group_size", "rollout.group_size", _group, default=1),
    Row("actor.group_size", convert=elsewhere, note="as gconfig.n_samples"),
    Row("gconfig.max_new_tokens ppo.gen.max_new_tokens", "rollout.max_new_tokens", default=16384),
    Row("gconfig.min_new_tokens ppo.gen.min_new_tokens", "rollout.min_new_tokens"),
    Row("gconfig.temperature ppo.gen.temperature", "rollout.temperature"),
    Row("gconfig.top_p ppo.gen.top_p", "rollout.top_p"),
    Row("gconfig.top_k ppo.gen.top_k", convert=only(-1, 10**6, 10**8, why="top-k sampling is not here: use top_p")),
    Row("gconfig.greedy ppo.gen.greedy", convert=only(False, why="a group of greedy completions has no advantages")),
    Row("gconfig.stop* gconfig.frequency_penalty", convert=by_hand("completions end with the end token alone")),
    Row("gconfig.* ppo.gen.n", note="part of sampling that only AReaL's workflows read"),
    Row("actor.path", "model.path"),
    Row("tokenizer_path ref.path", convert=_same_model, note=_KEPT),
    Row("actor.init_from_scratch", convert=only(False, why="a policy begins with weights")),
    Row("actor.dtype", "model.dtype", choice(_DTYPES, "dtype"), default="bfloat16"),
    Row("actor.bf16 ref.bf16", note="model.dtype: bfloat16 here; float16 is not"),
    Row("actor.gradient_checkpointing", "train.gradient_checkpointing"),
    Row("actor.attn_impl", note="train.attention"),
    Row("actor.mb_spec.max_tokens_per_mb actor_train.mb_spec.max_tokens_per_mb", "train.max_tokens_per_microbatch",
        _microbatch, default=32768, note="at least one whole sequence"),
    Row("actor.optimizer.type", convert=only("adam", "adamw", why="learners have AdamW alone")),
    Row("actor.optimizer.lr", "train.lr", default=1e-3),
    Row("actor.optimizer.weight_decay", "train.weight_decay", default=0.01),
    Row("actor.optimizer.beta1", "train.betas", lambda value, theirs: [value, theirs.get("actor.optimizer.beta2")],
        default=0.9),
    Row("actor.optimizer.beta2", convert=elsewhere, note="part of train.betas", default=0.999),
    Row("actor.optimizer.eps", "train.eps", default=1e-8),
    Row("actor.optimizer.gradient_clipping", "train.max_grad_norm", default=1.0),
    Row("actor.optimizer.lr_scheduler_type", "train.schedule",
        choice({name: name for name in ("constant", "linear", "cosine")}, "learning-rate schedule"),
        default="constant"),
    Row("actor.optimizer.warmup_steps_proportion", "train.warmup_steps", _warmup, default=0.001,
        note="a share of the steps there, a number of optimizer steps here"),
    Row("actor.optimizer.min_lr_ratio", convert=by_hand("schedules end at 0 here: train.schedule, train.lr")),
    Row("actor.optimizer.*", note="of mixed precision in float16, or of the host's memory"),
    Row("actor.use_decoupled_loss ppo.use_decoupled_loss", convert=_loss, default=False,
        note="the proximal policy is that of the step's beginning; the weight from the engine's is capped by masking"),
    Row("actor.eps_clip ppo.eps_clip", convert=elsewhere, note="loss.clip_low and loss.clip_high", default=0.2),
    Row("actor.eps_clip_higher actor.behav_imp_weight_cap actor.behave_imp_weight_cap ppo.behav_imp_weight_cap "
        "actor.use_sapo_loss actor.sapo_tau_* actor.importance_sampling_level",
        convert=elsewhere, note="with the loss"),
    Row("actor.behave_imp_weight_mode", convert=only("token_mask", "disabled", why="the cap masks tokens here")),
    Row("actor.recompute_logprob ppo.recompute_logprob", convert=elsewhere,
        note="learners compute the proximal logprobs wherever they differ from those of the update"),
    Row("actor.prox_logp_method", "loss.proximal",
        choice({"recompute": "recomputed", "loglinear": "interpolated"}, "proximal logprobs by")),
    Row("actor.c_clip ppo.c_clip", "loss.dual_clip"),
    Row("actor.kl_ctl ppo.kl_ctl", convert=_kl, default=0.1, note=_KL_NOTE),
    Row("actor.kl_estimator", convert=elsewhere, note="loss.kl_estimator"),
    Row("ppo.use_adaptive_kl_ctl", convert=only(False, why="the KL's weight stays as it is")),
    Row("actor.ppo_n_minibatches ppo.ppo_n_minibatches", "train.num_minibatches", default=4,
        note="minibatches are made of whole groups"),
    Row("actor.reward_norm.mean_level", convert=_advantage, default=None,
        note="a norm by group and another over the batch at once is the one by group here"),
    Row("actor.reward_norm.* actor.reward_norm actor.adv_norm* actor.group_adv_norm group_adv_norm ppo.adv_norm",
        convert=elsewhere, note="with the advantage: loss.advantage, loss.normalize_std"),
    Row("actor.reward_scaling ppo.reward_output_scaling", convert=_reward_scale,
        note="the reward's weight where that matters: it cancels in advantages divided by their deviation, without KL"),
    Row("actor.reward_bias ppo.reward_output_bias", note="cancels in advantages that are centred, as these are"),
    Row("actor.reward_clip ppo.max_reward_clip", note="rewards here are bounded by their functions"),
    Row("actor.discount actor.gae_lambda ppo.discount ppo.gae_lambda",
        convert=only(1, 1.0, why="without a critic each token has the whole reward of its sequence")),
    Row("ppo.disable_value", convert=only(True, why="PPO's critic is task: ppo; this table is for GRPO")),
    Row("critic* ppo.value_eps_clip ppo.critic_sample_reuse ppo.fuse_rew_ref", note="of a critic, which GRPO has not"),
    Row("ppo.actor_sample_reuse", convert=only(1, why="each rollout is trained on once")),
    Row("ppo.early_stop_imp_ratio", note="no minibatch is skipped; policy/ratio_mean shows it"),
    Row("actor.dynamic_sampling", "rollout.drop_zero_variance"),
    Row("actor.overlong_tokens", "rollout.overlong_tokens", _overlong),
    Row("actor.overlong_*", convert=elsewhere, note="with actor.overlong_tokens"),
    Row("actor.mask_no_eos_with_zero mask_too_long", "rollout.mask_truncated"),
    Row("actor.m2_threshold", convert=by_hand("loss.importance_correction: m2po, with its own threshold")),
    Row("actor.backend", "train.zero_stage", choice({"fsdp": 3, "megatron": 1}, "trainer"),
        note="DeepSpeed shards with ZeRO"),
    Row("actor.temperature actor.max_new_tokens actor.disable_dropout actor.weight_update_mode actor.type.* "
        "actor.megatron.* actor.fsdp.* actor.scheduling* actor.log_* actor.sglang.*",
        note="of AReaL's engines; here as sampling says, without dropout, with weights through shared memory"),
    Row("ref.* ref_inf.* actor_inf.*", note="the reference is computed as the policy is"),
    Row("vllm.dtype", "engine.dtype", choice(_DTYPES, "dtype of the engine")),
    Row("vllm.gpu_memory_utilization", "engine.gpu_memory_utilization"),
    Row("vllm.enforce_eager", "engine.enforce_eager"),
    Row("vllm.max_num_seqs", "engine.max_num_seqs"),
    Row("vllm.* sglang.*", note="of AReaL's server; engine.* has what vLLM needs"),
    Row("train_dataset.path dataset.path", convert=_train_data,
        note="the reward is in AReaL's script: rewards.0.name is correctness here"),
    Row("train_dataset.batch_size dataset.train_bs_n_seqs", "rollout.prompts_per_step", default=256,
        note="prompts, each with a group of completions"),
    Row("train_dataset.max_length dataset.max_prompt_len", "data.max_prompt_tokens", _max_prompt, default=None),
    Row("train_dataset.shuffle shuffle_dataset", "data.shuffle"),
    Row("valid_dataset.path", convert=_eval_data),
    Row("train_dataset.* valid_dataset.* dataset.*", note="of AReaL's data loader"),
    *(
        Row(f"{theirs}freq_{unit} exp_ctrl.{older}_freq_{unit}", f"{ours}_{our_unit}", convert)
        for theirs, older, ours, convert in (
            ("saver.", "save", "checkpoint.export_every", None),
            ("recover.", "ckpt", "checkpoint.every", None),
            ("checkpointer.", "ckpt", "checkpoint.every", None),
            ("evaluator.", "eval", "eval.every", _eval_every),
        )
        for unit, our_unit in (("epochs", "epochs"), ("steps", "steps"), ("secs", "s"))
    ),
    Row("stats_logger.wandb.mode wandb.mode", "metrics.wandb_mode",
        choice({"disabled": "disabled", "offline": "offline", "online": "auto", True: "auto"}, "W&B")),
    Row("stats_logger.wandb.project wandb.project", "metrics.wandb_project", lambda value, _: value or "hpc-grpo"),
    Row("stats_logger.wandb.entity wandb.entity", "metrics.wandb_entity"),
    Row("stats_logger.tensorboard.path tensorboard.path", "metrics.tensorboard", lambda value, _: bool(value)),
    Row("success_rate_ub success_rate_lb",
        convert=only(1.0, 0.0, why="set data.curriculum, or rollout.drop_zero_variance")),
    Row("*experiment_name *trial_name *.fileroot", note=_OWN),
    Row("stats_logger.* wandb.* launcher.* scheduler.* perf_tracer* saver.* recover.* evaluator.* checkpointer.* "
        "cluster.* exp_ctrl.* enable_offload torch_cache_mysophobia cache_clear_freq ray_temp_path rw_type "
        "metric_discovery_port cpus_per_* mem_per_*", note=_OWN),
)  # fmt: skip
