"""verl's keys: hydra overrides of verl.trainer.main_ppo (verl/trainer/config/ppo_trainer.yaml has the defaults).

Longer than other files: the table of one system is one file.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from hpc_grpo.config.foreign.table import (
    ByHandError,
    RefusedError,
    Row,
    Theirs,
    by_hand,
    choice,
    elsewhere,
    only,
    shared_memory,
)

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_LOSSES = {name: {"loss.name": ours} for name, ours in {"vanilla": "grpo", "gspo": "gspo", "clip_cov": "clip_cov",
           "kl_cov": "kl_cov", "cispo": "cispo", "sapo": "sapo"}.items()}  # fmt: skip
_OWN = "verl's own workers and buffers; engine.*, train.* and placement.* have what is needed here"


def _files(key: str, value: Any, theirs: Theirs) -> dict[str, Any]:
    """verl's parquet files hold chat messages, and the answer inside the column reward_model."""
    if value is None:
        return {}
    files = value if isinstance(value, list) else [value]
    columns = {
        "messages_field": theirs.get("data.prompt_key", default="prompt"),
        "answer_field": "reward_model.ground_truth",
    }
    if len(files) == 1:
        return {f"{key}.path": files[0], **{f"{key}.{name}": column for name, column in columns.items()}}
    return {f"{key}.mix": [{"path": file, "name": _name_of(file), **columns} for file in files]}


def _name_of(file: str) -> str:
    """Return the folder above the file: verl's are all called train.parquet and test.parquet."""
    return PurePath(file).parent.name or PurePath(file).stem


def _train_files(value: Any, theirs: Theirs) -> dict[str, Any]:
    return _files("data.train", value, theirs)


def _val_files(value: Any, theirs: Theirs) -> dict[str, Any]:
    return _files("data.eval", value, theirs) if _every(theirs.get("trainer.test_freq"), theirs) else {}


def _every(value: Any, _theirs: Theirs) -> int | None:
    return int(value) if value is not None and int(value) > 0 else None


def _length(value: Any, theirs: Theirs) -> dict[str, Any]:
    steps = theirs.get("trainer.total_training_steps")
    return {"train.total_steps": int(steps)} if steps else {"train.total_epochs": int(value)}


def _minibatches(value: Any, theirs: Theirs) -> int:
    batch = int(theirs.get("data.train_batch_size"))
    if batch % int(value):
        raise RefusedError(f"data.train_batch_size = {batch} is no multiple of it", train__num_minibatches=1)
    return batch // int(value)


def _updates(theirs: Theirs) -> int:
    """Count the optimizer steps of one of verl's steps."""
    return max(1, int(theirs.get("data.train_batch_size")) // int(theirs.get(f"{_ACTOR}.ppo_mini_batch_size")))


def _microbatch(value: Any, theirs: Theirs) -> int:
    """Return the tokens of one GPU's microbatch: its budget where that is dynamic, else all its sequences in full."""
    longest = int(theirs.get("data.max_prompt_length")) + int(theirs.get("data.max_response_length"))
    if theirs.get(f"{_ACTOR}.use_dynamic_bsz"):
        return max(int(theirs.get(f"{_ACTOR}.ppo_max_token_len_per_gpu", default=16384)), longest)
    if not theirs.given.get(f"{_ACTOR}.ppo_micro_batch_size_per_gpu"):  # the older key is of all GPUs
        value = int(value or 1) // (int(theirs.get("trainer.nnodes")) * int(theirs.get("trainer.n_gpus_per_node")))
    return max(1, int(value)) * longest


def _kl_loss(value: Any, theirs: Theirs) -> dict[str, Any]:
    in_reward = theirs.get("algorithm.use_kl_in_reward")
    if not value and not in_reward:
        return {"loss.kl_coef": 0.0}
    if value and in_reward:
        raise RefusedError("the KL is in the loss or in the rewards here, not in both", loss__kl_coef=0.0)
    coef, kind = (
        (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type")
        if value
        else ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    )
    estimator = str(theirs.get(kind))
    if estimator.removesuffix("+") not in _KL:
        raise RefusedError(f"the KL estimator {estimator!r} is not here; {', '.join(_KL)} are", loss__kl_coef=0.0)
    return {
        "loss.kl_coef": float(theirs.get(coef)),
        "loss.kl_estimator": _KL[estimator.removesuffix("+")],
        "loss.kl_in": "loss" if value else "reward",
    }


def _clip(value: Any, theirs: Theirs) -> dict[str, Any]:
    sides = {"low": theirs.get(f"{_ACTOR}.clip_ratio_low"), "high": theirs.get(f"{_ACTOR}.clip_ratio_high")}
    return {f"loss.clip_{side}": value if own is None else own for side, own in sides.items()}


def _dual_clip(value: Any, theirs: Theirs) -> float | None:
    """verl has a dual clip of 3 unless told otherwise, in its plain loss alone."""
    return float(value) if theirs.get(f"{_ACTOR}.policy_loss.loss_mode") == "vanilla" else None


def _aggregation(value: Any, theirs: Theirs) -> dict[str, Any]:
    if value == "seq-mean-token-sum":
        return {"loss.denominator": "constant", "loss.denominator_tokens": 1}
    if value == "seq-mean-token-sum-norm":
        return {"loss.denominator": "constant", "loss.denominator_tokens": int(theirs.get("data.max_response_length"))}
    table = {"token-mean": "tokens", "seq-mean-token-mean": "sequences"}
    return {"loss.denominator": choice(table, "loss aggregation")(value, theirs)}


def _advantage(value: Any, theirs: Theirs) -> dict[str, Any]:
    critic = RefusedError(
        "PPO's critic is task: ppo; this table is for algorithms without one", loss__advantage="group"
    )
    table = {"grpo": "group", "rloo": "rloo", "reinforce_plus_plus": "reinforce_pp", "gae": critic,
             "reinforce_plus_plus_baseline": "reinforce_pp_baseline"}  # fmt: skip
    chosen = choice(table, "advantage estimator")(value, theirs)
    std = theirs.get("algorithm.norm_adv_by_std_in_grpo")
    return {"loss.advantage": chosen, **({"loss.normalize_std": std} if chosen == "group" else {})}


def _nodes(value: Any, theirs: Theirs) -> dict[str, Any]:
    """verl trains and samples on the same GPUs in turn, as colocated learners and engines do."""
    gpus = int(theirs.get("trainer.n_gpus_per_node"))
    return {
        "launch.num_nodes": int(value),
        "launch.slurm.gpus_per_node": gpus,
        "placement.colocate": True,
        "placement.learners_per_node": gpus,
        "engine.engines_per_node": gpus,
    }


def _tensor_parallel(value: Any, _theirs: Theirs) -> dict[str, Any]:
    """Engines that share their GPUs with learners have one GPU each, whatever verl gives them."""
    return {"engine.tensor_parallel": 1}


def _loggers(value: Any, _theirs: Theirs) -> dict[str, Any]:
    names = value if isinstance(value, list) else [value]
    return {
        "metrics.wandb_mode": "auto" if "wandb" in names else "disabled",
        "metrics.tensorboard": "tensorboard" in names,
    }


def _warmup(value: Any, theirs: Theirs) -> int:
    """verl's schedule goes on once a step, ours with each optimizer step."""
    steps, ratio = int(value), theirs.get(f"{_ACTOR}.optim.lr_warmup_steps_ratio")
    if steps <= 0 and ratio:
        whole = theirs.get("trainer.total_training_steps")
        if not whole:
            raise ByHandError(
                f"{ratio:g} of the steps of the run, whose number only the data tells: set train.warmup_steps"
            )
        return round(float(ratio) * int(whole)) * _updates(theirs)
    return max(steps, 0) * _updates(theirs)


def _resampled(value: Any, theirs: Theirs) -> int | None:
    batches = int(theirs.get("algorithm.filter_groups.max_num_gen_batches", default=10))
    return max(2, batches) if value else None


def _correction(value: Any, _theirs: Theirs) -> dict[str, Any]:
    """Without a threshold verl does not correct for the engine's logprobs."""
    if not value:
        return {"loss.importance_correction": "none"}
    return {"loss.importance_correction": "truncated", "loss.importance_cap": float(value)}


def _offload(value: Any, _theirs: Theirs) -> str:
    return "cpu" if value else "none"


def _parallel(name: str) -> Any:
    return only(1, why=f"{name} parallelism in training is not here: learners are data parallel, with ZeRO")


ROWS = (
    Row("trainer.experiment_name", "run.name", default="verl"),
    Row("trainer.default_local_dir", "run.root", note="the run is NAME below it, with all of it inside"),
    Row("trainer.project_name", "metrics.wandb_project"),
    Row("trainer.logger", convert=_loggers, default=["console", "wandb"]),
    Row("trainer.nnodes", convert=_nodes, default=1,
        note="on each GPU a learner and an engine take turns, as in verl"),
    Row("trainer.n_gpus_per_node", convert=elsewhere, note="with trainer.nnodes", default=8),
    Row(f"{_ROLLOUT}.tensor_model_parallel_size", convert=_tensor_parallel, default=2,
        note="engines that take turns with learners have one GPU each here: without room for the model, set "
             "placement.colocate=false"),
    Row("trainer.total_epochs", convert=_length, default=30),
    Row("trainer.total_training_steps", convert=elsewhere, note="with a value, it is the length instead of the epochs"),
    Row("trainer.save_freq", "checkpoint.every_steps", _every, default=-1),
    Row("trainer.test_freq", "eval.every_steps", _every, default=-1),
    Row("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last", lambda value, _: value or 2),
    Row("trainer.val_before_train", note="with an eval there is one before training, too"),
    Row("trainer.device", convert=only("cuda", why="GPUs are NVIDIA's here, or there are none")),
    Row("data.train_files", convert=_train_files, note="the reward that verl chooses by data_source: rewards.0.name"),
    Row("data.val_files", convert=_val_files),
    Row("data.prompt_key", convert=elsewhere, note="with data.train_files"),
    Row("data.train_batch_size", "rollout.prompts_per_step", default=1024,
        note="prompts, each with a group of completions"),
    Row("data.max_prompt_length", "data.max_prompt_tokens", default=512),
    Row("data.max_response_length", "rollout.max_new_tokens", default=512),
    Row("data.filter_overlong_prompts", "data.drop_long_prompts"),
    Row("data.truncation", convert=only("error", why="prompts are never cut: they are dropped, or an error")),
    Row("data.shuffle", "data.shuffle"),
    Row("data.seed", "run.seed"),
    Row("data.image_key data.video_key", convert=by_hand("models of images are not here: the texts alone are read")),
    Row("data.trust_remote_code actor_rollout_ref.model.trust_remote_code",
        convert=only(False, why="code that comes with a model is not run")),
    Row("data.*", note=_OWN),
    Row("actor_rollout_ref.model.path", "model.path"),
    Row("actor_rollout_ref.model.enable_gradient_checkpointing", "train.gradient_checkpointing", default=True),
    Row("actor_rollout_ref.model.use_remove_padding actor_rollout_ref.model.use_shm",
        note="sequences are always packed"),
    Row("actor_rollout_ref.model.lora_rank", convert=only(0, why="LoRA is not here: all weights learn")),
    Row("actor_rollout_ref.model.lora* actor_rollout_ref.model.target_modules", note="of LoRA"),
    Row("actor_rollout_ref.model.*", note=_OWN),
    Row(f"{_ACTOR}.strategy", "train.zero_stage", choice({"fsdp": 3, "fsdp2": 3}, "trainer"), default="fsdp",
        note="DeepSpeed shards with ZeRO"),
    Row(f"{_ACTOR}.ppo_mini_batch_size", "train.num_minibatches", _minibatches, default=256,
        note="prompts there, the number of minibatches here"),
    Row(f"{_ACTOR}.ppo_micro_batch_size_per_gpu {_ACTOR}.ppo_micro_batch_size", "train.max_tokens_per_microbatch",
        _microbatch, default=1, note="sequences there, tokens here: as many full ones"),
    Row(f"{_ACTOR}.use_dynamic_bsz {_ACTOR}.ppo_max_token_len_per_gpu", convert=elsewhere,
        note="train.max_tokens_per_microbatch"),
    Row(f"{_ACTOR}.ppo_epochs", convert=only(1, why="each rollout is trained on once")),
    Row(f"{_ACTOR}.optim.lr", "train.lr", default=1e-6),
    Row(f"{_ACTOR}.optim.weight_decay", "train.weight_decay", default=0.01),
    Row(f"{_ACTOR}.optim.betas", "train.betas", default=[0.9, 0.999]),
    Row(f"{_ACTOR}.optim.lr_warmup_steps", "train.warmup_steps", _warmup, default=-1,
        note="steps there, optimizer steps here"),
    Row(f"{_ACTOR}.optim.lr_warmup_steps_ratio", convert=elsewhere, note="train.warmup_steps", default=0.0),
    Row(f"{_ACTOR}.optim.lr_scheduler_type {_ACTOR}.optim.warmup_style", "train.schedule",
        choice({"constant": "constant", "cosine": "cosine"}, "learning-rate schedule"), default="constant"),
    Row(f"{_ACTOR}.optim.min_lr_ratio", convert=by_hand("schedules end at 0 here: train.schedule, train.lr")),
    Row(f"{_ACTOR}.grad_clip {_ACTOR}.optim.clip_grad", "train.max_grad_norm", default=1.0),
    Row(f"{_ACTOR}.policy_loss.loss_mode", convert=choice(_LOSSES, "policy loss"), default="vanilla"),
    Row(f"{_ACTOR}.policy_loss.*",
        convert=by_hand("settings of that loss: loss.cov_fraction, loss.args and their like")),
    Row(f"{_ACTOR}.loss_agg_mode", convert=_aggregation, default="token-mean",
        note="exact over microbatches and learners here; verl averages the means of microbatches"),
    Row(f"{_ACTOR}.clip_ratio", convert=_clip, default=0.2),
    Row(f"{_ACTOR}.clip_ratio_low {_ACTOR}.clip_ratio_high", convert=elsewhere, note="loss.clip_low, loss.clip_high"),
    Row(f"{_ACTOR}.clip_ratio_c", "loss.dual_clip", _dual_clip, default=3.0),
    Row(f"{_ACTOR}.entropy_coeff", "loss.entropy_coef", default=0.0),
    Row(f"{_ACTOR}.use_kl_loss", convert=_kl_loss, default=False),
    Row(f"{_ACTOR}.kl_loss_coef", convert=elsewhere, note="loss.kl_coef", default=0.001),
    Row(f"{_ACTOR}.kl_loss_type", convert=elsewhere, note="loss.kl_estimator", default="low_var_kl"),
    Row("algorithm.use_kl_in_reward", convert=elsewhere, note="loss.kl_in", default=False),
    Row("algorithm.kl_ctrl.kl_coef", convert=elsewhere, note="loss.kl_coef", default=0.001),
    Row("algorithm.kl_penalty", convert=elsewhere, note="loss.kl_estimator", default="kl"),
    Row("algorithm.kl_ctrl.type", convert=only("fixed", why="the KL's weight stays as it is")),
    Row("algorithm.adv_estimator", convert=_advantage, default="gae"),
    Row("algorithm.norm_adv_by_std_in_grpo", convert=elsewhere, note="loss.normalize_std", default=True),
    Row("algorithm.gamma algorithm.lam",
        convert=only(1, 1.0, why="without a critic each token has the whole reward of its sequence")),
    Row("algorithm.filter_groups.enable", "rollout.dynamic_sampling", _resampled),
    Row("algorithm.filter_groups.*", convert=elsewhere, note="rollout.dynamic_sampling"),
    Row("algorithm.rollout_is_threshold", convert=_correction, default=None),
    Row("algorithm.rollout_correction.* algorithm.rollout_is*",
        convert=by_hand("loss.importance_correction has truncated, sequence, icepop and geometric")),
    Row(f"{_ACTOR}.fsdp_config.optimizer_offload", "train.offload_optimizer", _offload),
    Row(f"{_ACTOR}.fsdp_config.param_offload actor_rollout_ref.ref.fsdp_config.param_offload",
        note="between phases verl moves weights to the host; here learners keep theirs"),
    Row(f"{_ACTOR}.ulysses_sequence_parallel_size", convert=_parallel("sequence")),
    Row(f"{_ACTOR}.megatron.tensor_model_parallel_size", convert=_parallel("tensor")),
    Row(f"{_ACTOR}.megatron.pipeline_model_parallel_size", convert=_parallel("pipeline")),
    Row(f"{_ACTOR}.megatron.expert_model_parallel_size", convert=_parallel("expert")),
    Row(f"{_ACTOR}.shuffle", note="the order within a step is that of the prompts"),
    Row(f"{_ROLLOUT}.name", convert=only("vllm", why="engines are vLLM's alone")),
    Row(f"{_ROLLOUT}.n", "rollout.group_size", default=1),
    Row(f"{_ROLLOUT}.temperature", "rollout.temperature", default=1.0),
    Row(f"{_ROLLOUT}.top_p", "rollout.top_p"),
    Row(f"{_ROLLOUT}.top_k", convert=only(-1, 0, why="top-k sampling is not here: use top_p")),
    Row(f"{_ROLLOUT}.multi_turn.enable", convert=only(False, why="episodes have one turn here")),
    Row(f"{_ROLLOUT}.gpu_memory_utilization", "engine.gpu_memory_utilization", shared_memory, default=0.5,
        note="verl leaves the rest to training, which has the GPU to itself here while engines sleep"),
    Row(f"{_ROLLOUT}.max_num_seqs", "engine.max_num_seqs", default=1024),
    Row(f"{_ROLLOUT}.max_num_batched_tokens", "engine.max_num_batched_tokens"),
    Row(f"{_ROLLOUT}.enforce_eager", "engine.enforce_eager"),
    Row(f"{_ROLLOUT}.dtype", "engine.dtype",
        choice({"bfloat16": "bfloat16", "float32": "float32"}, "dtype of the engine")),
    Row(f"{_ROLLOUT}.val_kwargs.n", "eval.num_samples"),
    Row(f"{_ROLLOUT}.val_kwargs.temperature", "eval.temperature", default=0.0),
    Row(f"{_ROLLOUT}.val_kwargs.*", note="an eval samples as training does, at eval.temperature"),
    Row("reward_model.enable", convert=only(False, why="a reward model is a server: rewards.0.name = remote")),
    Row("reward_model.overlong_buffer.enable", "rollout.overlong_tokens",
        lambda value, theirs: theirs.get("reward_model.overlong_buffer.len") if value else None),
    Row("reward_model.overlong_buffer.*", convert=elsewhere, note="rollout.overlong_tokens"),
    Row("custom_reward_function.path custom_reward_function.name reward.custom_reward_function.*",
        convert=by_hand("rewards.0.name = FILE:FUNCTION, as f(prompts, completions, **columns) -> scores")),
    Row(f"{_ROLLOUT}.* {_ACTOR}.* actor_rollout_ref.ref.* actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl* "
        "reward_model.* trainer.* critic.* ray_kwargs.* ray_init.* global_profiler.*", note=_OWN),
)  # fmt: skip
