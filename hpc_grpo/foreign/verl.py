"""Translate verl's keys: hydra overrides of verl.trainer.main_ppo with FSDP.

Defaults are those of verl 0.9.1 (verl/trainer/config/_generated_ppo_trainer.yaml). verl's formulas are in
verl/trainer/ppo/core_algos.py.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from hpc_grpo.foreign import table
from hpc_grpo.foreign.table import Differs, RefusedError, Row, Theirs, as_list, below, by_hand, choice, only, positive

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_OPTIM = f"{_ACTOR}.optim"
_POLICY = f"{_ACTOR}.policy_loss"
_CORRECTION = "algorithm.rollout_correction"
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_LOSSES = {"vanilla": "grpo", "gspo": "gspo_token", "clip_cov": "clip_cov", "kl_cov": "kl_cov", "cispo": "cispo",
           "sapo": "sapo"}  # fmt: skip
_ADVANTAGES = {"grpo": "group", "grpo_vectorized": "group", "rloo": "rloo", "rloo_vectorized": "rloo",
               "reinforce_plus_plus": "reinforce_pp",
               "reinforce_plus_plus_baseline": "reinforce_pp_baseline"}  # fmt: skip
_OVERLONG = ("reward_model.overlong_buffer", "reward.reward_kwargs.overlong_buffer_cfg",
             "reward_model.reward_kwargs.overlong_buffer_cfg")  # fmt: skip


def _files(key: str, value: Any, theirs: Theirs) -> dict[str, Any]:
    """Return our sources. verl's parquet files hold chat messages, and the answer inside the column reward_model."""
    files = as_list(value)
    columns = {"messages_field": theirs.get("data.prompt_key"), "answer_field": "reward_model.ground_truth"}
    if len(files) == 1:
        return below(key, {"path": files[0], **columns})
    # verl's files are all called train.parquet or test.parquet, so the folder gives the name.
    mix = [{"path": file, "name": PurePath(file).parent.name or PurePath(file).stem, **columns} for file in files]
    return {f"{key}.mix": mix} if mix else {}


def _minibatches(value: Any, theirs: Theirs) -> int:
    batch = int(theirs.get("data.train_batch_size"))
    if batch % int(value):
        raise RefusedError(f"data.train_batch_size = {batch} is no multiple of this", {"train.num_minibatches": 1})
    return batch // int(value)


def _microbatch(value: Any, theirs: Theirs) -> int:
    """Return the tokens of one GPU's microbatch: a dynamic budget, or all its sequences at full length."""
    longest = int(theirs.get("data.max_prompt_length")) + int(theirs.get("data.max_response_length"))
    if theirs.get(f"{_ACTOR}.use_dynamic_bsz"):
        return max(int(theirs.get(f"{_ACTOR}.ppo_max_token_len_per_gpu")), longest)
    if not theirs.get(f"{_ACTOR}.ppo_micro_batch_size_per_gpu"):  # the older key counts all GPUs
        value = int(value or 1) // (int(theirs.get("trainer.nnodes")) * int(theirs.get("trainer.n_gpus_per_node")))
    return max(1, int(value)) * longest


def _estimator(name: Any) -> str:
    """Return our estimator with the value of verl's. A `+` at the end, for k2's gradient, is ignored."""
    base = str(name).removesuffix("+")
    if base not in _KL:
        raise RefusedError(f"the KL estimator {name!r} is not supported; {', '.join(_KL)} are", {"loss.kl.coef": 0.0})
    return _KL[base]


def _kl_loss(value: Any, theirs: Theirs) -> Any:
    in_reward = theirs.get("algorithm.use_kl_in_reward")
    if value and in_reward:
        raise RefusedError("the KL is in the loss or in the rewards here, not in both", {"loss.kl.coef": 0.0})
    if value:
        name, coef = str(theirs.get(f"{_ACTOR}.kl_loss_type")), theirs.get(f"{_ACTOR}.kl_loss_coef")
        estimator = _estimator(name)
        keys = below("loss.kl", {"coef": float(coef), "where": "loss", "estimator": estimator})
        if not name.endswith("+") or estimator == "k2":
            return Differs(keys, "at most 10 for each token there, unbounded here" if estimator == "k3" else "")
        return Differs({**keys, "loss.kl.estimator": "k2"}, f"value of {estimator}, gradient of k2 there; here k2: the "
                       "same gradient, but k2's value in loss/kl")  # fmt: skip
    if not in_reward:
        return {"loss.kl.coef": 0.0}
    name, coef = theirs.get("algorithm.kl_penalty"), theirs.get("algorithm.kl_ctrl.kl_coef")
    keys = below("loss.kl", {"coef": float(coef), "where": "reward", "estimator": _estimator(name)})
    return Differs(keys, "the KL is subtracted before the norm there: A = norm(r - coef * sum of KL); after the norm "
                   "here: A_t = norm(r) - coef * sum of the KL from t on")  # fmt: skip


def _loss(value: Any, theirs: Theirs) -> Any:
    name = choice(_LOSSES, "policy loss")(value)
    keys: dict[str, Any] = {"loss.name": name}
    if name not in ("sapo", "kl_cov"):
        # clip_ratio alone has no effect: clip_ratio_low and clip_ratio_high have a default that wins.
        plain = theirs.get(f"{_ACTOR}.clip_ratio")
        sides = {side: theirs.exact(f"{_ACTOR}.clip_ratio_{side}") for side in ("low", "high")}
        keys |= {f"loss.clip_{side}": float(plain if own is None else own) for side, own in sides.items()}
    if name == "grpo":
        keys["loss.args.dual_clip"] = theirs.get(f"{_ACTOR}.clip_ratio_c")
    if name == "sapo":
        keys |= {"loss.args.temperature_positive": theirs.get(f"{_ACTOR}.tau_pos"),
                 "loss.args.temperature_negative": theirs.get(f"{_ACTOR}.tau_neg")}  # fmt: skip
    if name == "kl_cov":
        keys |= {"loss.args.fraction": theirs.get(f"{_POLICY}.kl_cov_ratio"),
                 "loss.args.kl_coef": theirs.get(f"{_POLICY}.ppo_kl_coef")}  # fmt: skip
        return Differs(keys, "the microbatch's tokens, ppo_kl_coef * |log r| there; the optimizer step's, k3 here")
    if name == "clip_cov":
        theirs_of = {"fraction": "ratio", "low": "lb", "high": "ub"}
        keys |= {f"loss.args.{ours}": theirs.get(f"{_POLICY}.clip_cov_{own}") for ours, own in theirs_of.items()}
        return Differs(keys, "tokens are drawn from each microbatch there, from the optimizer step here")
    if name == "cispo":
        keys["loss.clip_low"] = min(1.0, keys["loss.clip_low"])  # ratios are positive
    return keys


def _aggregation(value: Any, theirs: Theirs) -> Any:
    longest = theirs.get(f"{_ACTOR}.loss_scale_factor", "data.max_response_length")
    denominators = {"token-mean": "tokens", "seq-mean-token-mean": "sequences", "seq-mean-token-sum": 1,
                    "seq-mean-token-sum-norm": int(longest)}  # fmt: skip
    denominator, sequences = choice(denominators, "loss aggregation")(value), {"loss.denominator": "sequences"}
    loss = theirs.get(f"{_POLICY}.loss_mode")
    if denominator != "sequences" and loss == "gspo":
        raise RefusedError(
            f"verl 0.9 divides gspo's loss as loss_agg_mode = {value} says, verl up to 0.8 always by sequences. Set "
            f"{_ACTOR}.loss_agg_mode=seq-mean-token-mean, or here loss.denominator", sequences)  # fmt: skip
    if denominator != "sequences" and loss == "sapo":
        return Differs(sequences, f"loss_agg_mode = {value} is only for KL and entropy there: sapo's own term is "
                       "always seq-mean-token-mean; here all terms are")  # fmt: skip
    return {"loss.denominator": denominator}


def _advantage(value: Any, theirs: Theirs) -> Any:
    if value == "gae":
        raise RefusedError("PPO's critic needs task: ppo; this table is for algorithms without a critic", {
            "loss.advantage.name": "group"})  # fmt: skip
    keys: dict[str, Any] = {"loss.advantage.name": choice(_ADVANTAGES, "advantage estimator")(value)}
    if keys["loss.advantage.name"] == "group":
        is_scaled = bool(theirs.get("algorithm.norm_adv_by_std_in_grpo"))
        return keys | {"loss.advantage.normalize_std": is_scaled, "loss.advantage.args.eps": 1e-6}
    note = "mean and deviation are over all tokens of the batch, the latter with N - 1, there; over its completions, "
    return keys if "rloo" in value else Differs(keys, f"{note}with N, here")


def _nodes(value: Any, theirs: Theirs) -> dict[str, Any]:
    """Return a colocated placement: verl trains and samples on the same GPUs in turn."""
    gpus = int(theirs.get("trainer.n_gpus_per_node"))
    return {"launch.num_nodes": int(value), "launch.slurm.gpus_per_node": gpus, "placement.colocate": True,
            "placement.learners_per_node": gpus, "engine.engines_per_node": gpus}  # fmt: skip


def _parallel_engine(value: Any, _theirs: Theirs) -> Any:
    """Return one GPU per engine: an engine that shares GPUs with learners cannot have more."""
    keys, note = {"engine.tensor_parallel": 1}, "engines that take turns with learners have one GPU each here: if the "
    return keys if value in (None, 1) else Differs(keys, f"{note}model does not fit, set placement.colocate=false")


def _warmup(value: Any, theirs: Theirs) -> int:
    """Return our warmup in optimizer steps: verl's schedule advances once per step, ours with each optimizer step."""
    ratio, whole = theirs.get(f"{_OPTIM}.lr_warmup_steps_ratio"), theirs.get("trainer.total_training_steps")
    steps = int(value) if int(value) > 0 else int(table.share_of_steps(ratio, whole, "train.warmup_steps"))
    batch, of_step = theirs.get("data.train_batch_size"), theirs.get(f"{_ACTOR}.ppo_mini_batch_size")
    return steps * max(1, int(batch) // int(of_step))


def _schedule(value: Any, theirs: Theirs) -> Any:
    end, cycles = (theirs.get(f"{_OPTIM}.{key}") for key in ("min_lr_ratio", "num_cycles"))
    note = f"cosine of {cycles:g} waves down to {end:g} of lr there; half a wave down to 0 here"
    name = theirs.get(f"{_OPTIM}.warmup_style", default=value)
    return table.schedule(name, "" if (end, cycles) == (0, 0.5) else note)


def _resampled(value: Any, theirs: Theirs) -> Any:
    if not value:
        return None
    if (metric := theirs.get("algorithm.filter_groups.metric")) not in ("reward", "seq_reward", "seq_final_reward"):
        raise RefusedError(f"groups are compared by their rewards, not by {metric}", {"rollout.dynamic_sampling": 10})
    batches = int(theirs.get("algorithm.filter_groups.max_num_gen_batches"))
    note = "no limit there; here at most 10 times prompts_per_step are sampled"
    return batches if batches >= 2 else Differs(10, note)


def _correction(value: Any, theirs: Theirs) -> dict[str, Any]:
    """Return our correction: weights min(learner / engine, threshold), or a mask outside of `lower_upper`."""
    none = {"loss.correction.name": "none"}
    if theirs.get(f"{_CORRECTION}.bypass_mode"):
        if theirs.get(f"{_CORRECTION}.loss_type") != "ppo_clip":
            raise RefusedError("bypass_mode is only supported with loss_type ppo_clip", none)
        return {"loss.proximal": "engine", **none}
    if not value:
        return none
    low, _, high = str(theirs.get(f"{_CORRECTION}.rollout_is_threshold")).rpartition("_")
    names = {"token": ("truncated", "icepop"), "sequence": ("sequence", "sequence_mask")}
    name = choice(names, "importance sampling by")(value)[bool(low)]
    keys = {"loss.correction.name": name, "loss.correction.args.cap": float(high)}
    return keys | ({"loss.correction.args.low": float(low)} if low else {})


def _overlong(value: Any, theirs: Theirs) -> int | None:
    buffer, factor = (theirs.get(*(f"{name}.{key}" for name in _OVERLONG)) for key in ("len", "penalty_factor"))
    if value and buffer is None:
        raise RefusedError("the overlong buffer has no len")
    return table.overlong(value, buffer, 1.0 if factor is None else factor)


ROWS = (
    Row("trainer.experiment_name", "run.name", lambda value, _: str(value), default="gsm8k"),
    Row("trainer.default_local_dir", "run.root", lambda value, _: value or "checkpoints",
        note="the run directory is NAME below it"),
    Row("trainer.project_name", "metrics.wandb.project", default="verl_examples"),
    Row("trainer.logger", convert=table.reporters, default=["console", "wandb"]),
    Row("trainer.nnodes", convert=_nodes, default=1, also={"trainer.n_gpus_per_node": 8}),
    Row(f"{_ROLLOUT}.tensor_model_parallel_size", convert=_parallel_engine, default=2),
    Row(table.named(_ROLLOUT, "data_parallel_size expert_parallel_size pipeline_model_parallel_size"),
        convert=_parallel_engine),
    Row("trainer.total_epochs", convert=lambda value, theirs: table.length(
        theirs.get("trainer.total_training_steps"), value), default=30, also={"trainer.total_training_steps": None}),
    Row("trainer.save_freq", "checkpoint.every", positive, default=-1),
    Row("trainer.test_freq", "eval.every", positive, default=-1),
    Row("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last", table.kept, default=None),
    Row("trainer.val_before_train", note="if there are evals, one runs before training too"),
    Row("trainer.val_only", convert=only(False, why="for an eval without training use hpc-grpo model eval")),
    Row("trainer.device", convert=only("cuda", why="only NVIDIA's GPUs, or CPUs, are supported")),
    Row("trainer.critic_warmup", convert=only(0, why="there is no critic to warm up")),
    Row("trainer.v1.trainer_mode", convert=only("sync", why="for an asynchronous trainer set "
        "rollout.max_policy_lag")),
    Row("trainer.resume_mode trainer.resume_from_path", convert=only(
        "auto", "disable", why="the same command resumes; begin another run from model.path")),
    Row("--config-name", convert=only("ppo_trainer", "ppo_trainer.yaml", why="the table has the defaults of verl's "
        "ppo_trainer, which trains with FSDP")),
    Row("--config-path", note="the folder of verl's defaults"),
    Row("data.train_files", convert=lambda value, theirs: _files("data.train", value, theirs),
        also={"data.prompt_key": "prompt"}, note="verl chooses the reward by data_source; here it is rewards.0.name"),
    Row("data.val_files", convert=lambda value, theirs: _files("data.eval", value, theirs)
        if positive(theirs.get("trainer.test_freq"), theirs) else {}),
    Row("data.train_max_samples data.val_max_samples", convert=only(-1, why="set max_items of the data set")),
    Row("data.sampler.class_path data.sampler.class_name",
        convert=only(why="prompts come in the order of data.shuffle, or by data.curriculum")),
    Row("data.custom_cls.path data.custom_cls.name",
        convert=by_hand("write a function that yields items", "data.train.path")),
    Row("data.train_batch_size", "rollout.prompts_per_step", default=1024),
    Row("data.gen_batch_size", note="as many groups are sampled as are trained on; with filter_groups further ones"),
    Row("data.max_prompt_length", "data.max_prompt_tokens", default=512),
    Row("data.max_response_length", "rollout.max_new_tokens", default=512),
    Row("data.filter_overlong_prompts", "data.drop_long_prompts", default=False),
    Row("data.truncation", convert=only("error", why="prompts are never cut: a long one is dropped, or an error")),
    Row("data.shuffle", "data.shuffle", default=True),
    Row("data.seed", "run.seed", lambda value, _: value or 0),
    Row("data.apply_chat_template_kwargs data.apply_chat_template_kwargs.*", "data.template_args",
        lambda _, theirs: theirs.section("data.apply_chat_template_kwargs")),
    Row("data.trust_remote_code actor_rollout_ref.model.trust_remote_code",
        convert=only(False, why="code that comes with a model is not run")),
    Row("data.tokenizer actor_rollout_ref.model.tokenizer_path actor_rollout_ref.model.hf_config_path",
        convert=only(why="tokenizer and config are those of model.path")),
    Row("data.image_key", note="for data with images set data.images to that column"),
    Row("data.video_key data.audio_key data.image_patch_size data.mm_processor_kwargs "
        "data.return_multi_modal_inputs data.reward_fn_key data.return_* data.*_workers data.use_shm "
        "data.val_batch_size data.validation_shuffle data.tool_config_path data.function_tool_path",
        note="part of verl's data loader; models here read only texts and images"),
    Row("actor_rollout_ref.model.path", "model.path"),
    Row("actor_rollout_ref.model.custom_chat_template", convert=by_hand("write it into a Jinja file", "data.template")),
    Row(table.named("actor_rollout_ref.model", "override_config override_config.* external_lib"),
        convert=only({}, why="the model's config.json is not changed")),
    Row("actor_rollout_ref.model.enable_gradient_checkpointing", "train.gradient_checkpointing", default=True),
    Row("actor_rollout_ref.model.lora_rank", convert=table.lora(
        *(f"actor_rollout_ref.model.{key}" for key in ("lora_rank", "lora_alpha", "target_modules"))),
        also={"actor_rollout_ref.model.lora_alpha": 16, "actor_rollout_ref.model.target_modules": "all-linear"}),
    Row("actor_rollout_ref.model.lora.rank", convert=only(0, why="for Megatron's adapters: set lora.rank")),
    Row("actor_rollout_ref.model.exclude_modules", convert=only(why="lora.targets names what gets an adapter")),
    Row("actor_rollout_ref.model.lora_adapter_path", "model.adapter"),
    Row("actor_rollout_ref.model.lora*", note="part of LoRA"),
    Row("actor_rollout_ref.model.mtp.enable", convert=only(False, why="multi-token prediction is not supported")),
    Row("actor_rollout_ref.model.mtp.* actor_rollout_ref.model.use_* actor_rollout_ref.model.enable_activation_offload "
        "actor_rollout_ref.model.fused_kernel_options.* actor_rollout_ref.model.tiled_mlp.* "
        "actor_rollout_ref.model.torch_dtype", note="verl's own workers and buffers"),
    Row(f"{_ACTOR}.strategy", "train.zero_stage", choice({"fsdp": 3, "fsdp2": 3}, "trainer"), default="fsdp",
        note="ZeRO 3 shards as FSDP does"),
    Row(f"{_ACTOR}.fsdp_config.dtype", "model.dtype", table.dtype, default="bfloat16"),
    Row(f"{_ACTOR}.ppo_mini_batch_size", "train.num_minibatches", _minibatches, default=256),
    Row(f"{_ACTOR}.ppo_micro_batch_size_per_gpu {_ACTOR}.ppo_micro_batch_size", "train.max_tokens_per_microbatch",
        _microbatch, default=None,
        also={f"{_ACTOR}.use_dynamic_bsz": False, f"{_ACTOR}.ppo_max_token_len_per_gpu": 16384}),
    Row(f"{_ACTOR}.ppo_epochs", convert=only(1, why="each rollout is trained on once")),
    Row(f"{_OPTIM}.lr", "train.lr", default=1e-6),
    Row(f"{_OPTIM}.weight_decay", "train.adamw.weight_decay", table.weight_decay, default=0.01),
    Row(f"{_OPTIM}.betas", "train.adamw.betas", default=[0.9, 0.999]),
    Row(table.named(_OPTIM, "optimizer optimizer_impl override_optimizer_config override_optimizer_config.*"),
        convert=only("AdamW", "torch.optim", {}, why="learners only have AdamW")),
    Row(f"{_OPTIM}.lr_warmup_steps", "train.warmup_steps", _warmup, default=-1,
        also={f"{_OPTIM}.lr_warmup_steps_ratio": 0.0}),
    Row(f"{_OPTIM}.lr_scheduler_type", "train.schedule", _schedule, default="constant",
        also={f"{_OPTIM}.warmup_style": None, f"{_OPTIM}.min_lr_ratio": 0.0, f"{_OPTIM}.num_cycles": 0.5}),
    Row(table.named(_OPTIM, "total_training_steps zero_indexed_step"), note="the run's length is train.total_*"),
    Row(f"{_OPTIM}.clip_grad {_OPTIM}.grad_clip {_ACTOR}.grad_clip", "train.max_grad_norm",  # older versions: the third
        lambda _, theirs: theirs.get(f"{_OPTIM}.grad_clip", f"{_OPTIM}.clip_grad", f"{_ACTOR}.grad_clip"), default=1.0),
    Row(f"{_POLICY}.loss_mode", convert=_loss, default="vanilla", also={f"{_ACTOR}.{key}": own for key, own in {
            "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "tau_pos": 1.0,
            "tau_neg": 1.05, "policy_loss.clip_cov_ratio": 0.0002, "policy_loss.clip_cov_lb": 1.0,
            "policy_loss.clip_cov_ub": 5.0, "policy_loss.kl_cov_ratio": 0.0002,
            "policy_loss.ppo_kl_coef": 0.1}.items()}),
    Row(f"{_ACTOR}.loss_agg_mode", convert=_aggregation, default="token-mean",
        also={f"{_ACTOR}.loss_scale_factor": None}),
    Row(f"{_ACTOR}.entropy_coeff", "loss.entropy_coef", default=0),
    Row(f"{_ACTOR}.use_kl_loss", convert=_kl_loss, default=False,
        also={f"{_ACTOR}.kl_loss_coef": 0.001, f"{_ACTOR}.kl_loss_type": "low_var_kl",
              "algorithm.use_kl_in_reward": False, "algorithm.kl_ctrl.kl_coef": 0.001, "algorithm.kl_penalty": "kl"}),
    Row("algorithm.kl_ctrl.type", convert=only("fixed", why="the KL's coefficient is constant")),
    Row("algorithm.adv_estimator", convert=_advantage, default="gae", also={"algorithm.norm_adv_by_std_in_grpo": True}),
    Row("algorithm.gamma", convert=lambda value, theirs: only(
        value if theirs.get("algorithm.adv_estimator") != "reinforce_plus_plus" else 1,  # no other one reads it
        why="without a critic each token has the whole reward of its sequence")(value, theirs)),
    Row(f"algorithm.lam algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl algorithm.pf_ppo.* {_POLICY}.dro_beta "
        f"{_CORRECTION}.rollout_rs_threshold", note="read only with a refused value: adv_estimator gae, kl_ctrl.type "
        "adaptive, use_pf_ppo, loss_mode dro, rollout_rs"),
    Row("algorithm.use_pf_ppo", convert=only(False, why="rollouts are not resampled by their rewards")),
    Row("algorithm.filter_groups.enable", "rollout.dynamic_sampling", _resampled, default=False,
        also={"algorithm.filter_groups.metric": "reward", "algorithm.filter_groups.max_num_gen_batches": 0}),
    Row("algorithm.filter_groups.max_inflight_gen_batches", note="engines are always kept full"),
    Row(f"{_CORRECTION}.rollout_is", convert=_correction, default=None,
        also={f"{_CORRECTION}.rollout_is_threshold": 2.0, f"{_CORRECTION}.bypass_mode": False,
              f"{_CORRECTION}.loss_type": "ppo_clip"}),
    Row(f"{_CORRECTION}.rollout_rs", convert=only(why="there is only one correction: to mask sequences, set "
        "loss.correction to sequence_mask or geometric")),
    Row(f"{_CORRECTION}.rollout_is_batch_normalize", convert=only(
        False, why="weights are not divided by their mean over the batch")),
    Row("algorithm.rollout_is_threshold", convert=lambda value, _: below(
        "loss.correction", {"name": "truncated", "args.cap": float(value)}) if value else {}),
    Row("algorithm.rollout_is*",
        convert=by_hand("choose truncated, sequence, sequence_mask or icepop", "loss.correction")),
    Row(f"{_ACTOR}.fsdp_config.optimizer_offload", "train.offload_optimizer",
        lambda value, _: "cpu" if value else "none", default=False),
    Row(f"{_ACTOR}.fsdp_config.param_offload actor_rollout_ref.ref.fsdp_config.param_offload",
        note="between phases verl moves weights to the host; here learners keep theirs"),
    Row(f"{_ACTOR}.ulysses_sequence_parallel_size {_ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
        convert=table.split_sequences),
    Row(f"{_ACTOR}.qat.enable {_ACTOR}.fsdp_config.qat.enable {_ROLLOUT}.qat.enable {_ROLLOUT}.quantization",
        convert=only(False, why="quantised weights are not supported")),
    Row(f"{_ACTOR}.freeze_vision_tower", note="with data.images the tower is frozen; model.train_vision trains it"),
    Row(f"{_ACTOR}.shuffle {_ACTOR}.data_loader_seed", note="the order within a step is that of the prompts"),
    Row(f"{_ROLLOUT}.name", convert=lambda value, _: Differs({}, table.engine(value))),
    Row(f"{_ROLLOUT}.n", "rollout.group_size", default=1),
    Row(f"{_ROLLOUT}.temperature", "rollout.temperature", default=1.0),
    Row(f"{_ROLLOUT}.top_p", "rollout.top_p", default=1),
    Row(f"{_ROLLOUT}.top_k {_ROLLOUT}.val_kwargs.top_k", convert=only(
        -1, 0, why="top-k sampling is not supported: use top_p")),
    Row(f"{_ROLLOUT}.do_sample", convert=only(True, why="a group of greedy completions has no advantages")),
    Row(f"{_ROLLOUT}.ignore_eos", convert=only(False, why="completions end with the end token")),
    Row(f"{_ROLLOUT}.over_sample_rate", convert=only(0, why="every group that is sampled is trained on")),
    Row(f"{_ROLLOUT}.multi_turn.enable {_ROLLOUT}.agent.default_agent_loop", convert=only(
        False, "single_turn_agent", why="several turns need an environment here: write section environment yourself")),
    Row(f"{_ROLLOUT}.gpu_memory_utilization", "engine.vllm.gpu_memory_utilization", table.shared_memory, default=0.5),
    Row(f"{_ROLLOUT}.max_num_seqs", "engine.vllm.max_num_seqs", default=256),
    Row(f"{_ROLLOUT}.max_num_batched_tokens", "engine.vllm.max_num_batched_tokens", default=8192),
    Row(f"{_ROLLOUT}.enforce_eager", "engine.vllm.enforce_eager", default=False),
    Row(f"{_ROLLOUT}.enable_prefix_caching", "engine.vllm.enable_prefix_caching", default=True),
    Row(f"{_ROLLOUT}.dtype", "engine.dtype", table.dtype, default="bfloat16"),
    Row(f"{_ROLLOUT}.val_kwargs.n", "eval.num_samples", default=1),
    Row(f"{_ROLLOUT}.val_kwargs.temperature", "eval.temperature", default=0),
    Row(f"{_ROLLOUT}.val_kwargs.top_p", "eval.top_p", default=1.0),
    Row(f"{_ROLLOUT}.val_kwargs.do_sample", note="verl does not read it either: a temperature of 0 is greedy"),
    Row(f"{_ROLLOUT}.enable_rollout_routing_replay", "train.router_replay", default=False),
    Row("reward_model.enable reward.reward_model.enable",
        convert=only(False, why="a reward model is a server: rewards.0.name = remote")),
    Row(" ".join(f"{name}.enable" for name in _OVERLONG), "rollout.overlong_tokens", _overlong,
        also={f"{name}.{key}": None for name in _OVERLONG for key in ("len", "penalty_factor")}),
    Row("reward_model.reward_manager reward.reward_manager.name", convert=only(
        "naive", "dapo", "prime", why="the reward is rewards.0.name")),
    Row("custom_reward_function.* reward.custom_reward_function.path",
        convert=by_hand("name it FILE:FUNCTION, for f(prompts, completions, **columns) -> scores", "rewards")),
    Row("distillation.enabled", convert=only(False, why="a teacher needs task: distill")),
    Row("distillation.* sandbox_fusion.* reward.custom_reward_function.name reward.* reward_model.*",
        note="part of rewards and teachers that other keys switch on"),
    Row(" ".join((
        table.named(_ROLLOUT, "mode load_format seed full_determinism nnodes n_gpus_per_node cudagraph_capture_sizes "
               "layered_summon free_cache_engine enable_chunked_prefill disable_log_stats skip_tokenizer_init "
               "logprobs_mode max_model_len scheduling_policy calculate_log_probs moe_load_balance_metrics_interval "
               "multi_stage_wake_up log_prob_* prompt_length response_length quantization_config_file "
               "router_config_path agent.* checkpoint_engine.* disaggregation.* engine_kwargs.* multi_turn.* "
               "prometheus.* trace.* mtp mtp.* qat.*"),
        table.named(_ACTOR, "calculate_entropy calculate_sum_pi_squared checkpoint.* entropy_checkpointing "
               "entropy_from_logits_* pad_to_length profiler.* qat.* rollout_n use_fused_kernels use_prefix_grouper "
               "use_remove_padding use_torch_compile fsdp_config.* megatron.*"),
        "actor_rollout_ref.ref.* actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl* critic.* ray_kwargs.* "
        "ray_init.* global_profiler.* transfer_queue.* skip.* trainer.v1.* trainer.use_v1",
        table.named("trainer", "balance_batch checkpoint_callback_class default_hdfs_dir del_local_ckpt_after_load "
               "esi_redundant_time log_val_generations max_critic_ckpt_to_keep ray_wait_register_center_timeout "
               "rollout_data_dir validation_data_dir use_legacy_worker_impl"),
    )), note="verl's own workers and buffers"),
)  # fmt: skip
