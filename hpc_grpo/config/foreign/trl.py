"""TRL's keys: GRPOConfig with what it inherits from transformers, ScriptArguments, ModelConfig, and open-r1's recipes.

Defaults are those of TRL 1.16 (trl/trainer/grpo_config.py). Longer than other files: the table of one system is one.
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

_HUB = "of the hub, of logging, or of transformers' trainer"
_THINK = {"reasoning_tag": "think", "answer_tag": "answer"}
_REWARDS: dict[str, dict[str, Any]] = {
    "accuracy": {"name": "math"},
    "accuracy_reward": {"name": "math"},
    "format": {"name": "strict_format", "args": _THINK},
    "think_format_reward": {"name": "strict_format", "args": _THINK},
    "repetition_penalty": {"name": "repetition"},
}
"""Rewards that open-r1 and TRL have by name -> ours."""

_LOSSES = {
    "grpo": {"loss.name": "grpo", "loss.denominator": "sequences"},
    "dapo": {"loss.name": "grpo", "loss.denominator": "tokens"},
    "bnpo": {"loss.name": "bnpo"},
    "dr_grpo": {"loss.name": "dr_grpo"},
    "cispo": {"loss.name": "cispo"},
    "sapo": {"loss.name": "sapo"},
}


def _completions(theirs: Theirs) -> int:
    """Count the completions of one optimizer step, over all processes."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
    product = 1
    for name in names:
        product *= int(theirs.get(name))
    return product


def _generated(theirs: Theirs) -> int:
    """Count the completions that are sampled together: of one optimizer step, unless TRL is told otherwise."""
    if whole := theirs.get("generation_batch_size"):
        return int(whole)
    if per := theirs.get("steps_per_generation"):
        return int(theirs.get("per_device_train_batch_size")) * int(theirs.get("num_processes")) * int(per)
    return _completions(theirs)


def _prompts(theirs: Theirs) -> int:
    return max(1, _generated(theirs) // int(theirs.get("num_generations")))


def _batch(value: Any, theirs: Theirs) -> dict[str, Any]:
    longest = int(theirs.get("max_prompt_length")) + int(theirs.get("max_completion_length"))
    return {"rollout.prompts_per_step": _prompts(theirs), "train.max_tokens_per_microbatch": int(value) * longest}


def _processes(value: Any, theirs: Theirs) -> dict[str, Any]:
    """TRL's engines share the GPUs of its processes, unless there is a server, or a device for one engine."""
    learners = {"placement.learners_per_node": int(value)}
    if theirs.get("vllm_mode") == "server" or theirs.get("vllm_device"):
        return {**learners, "engine.tensor_parallel": int(theirs.get("vllm_tensor_parallel_size", default=1)),
                "engine.engines_per_node": 1}  # fmt: skip
    return {**learners, "placement.colocate": True, "engine.engines_per_node": int(value)}


def _updates(theirs: Theirs) -> int:
    """Count the optimizer steps for each batch of rollouts."""
    if int(theirs.get("num_iterations")) != 1:
        return 1
    return max(1, min(_generated(theirs) // _completions(theirs), _prompts(theirs)))


def _minibatches(value: Any, theirs: Theirs) -> int:
    if int(value) != 1:
        raise RefusedError("each rollout is trained on once (num_iterations)", train__num_minibatches=1)
    return _updates(theirs)


def _batches(steps: Any, theirs: Theirs) -> int:
    """Return how many batches of rollouts TRL's steps are: it counts optimizer steps."""
    return max(1, round(int(steps) / _updates(theirs)))


def _length(value: Any, theirs: Theirs) -> dict[str, Any]:
    if int(value) > 0:
        return {"train.total_steps": _batches(value, theirs)}
    epochs = float(theirs.get("num_train_epochs"))
    if epochs != int(epochs) or epochs < 1:
        raise ByHandError(f"{epochs:g} epochs are no whole number: set train.total_steps")
    return {"train.total_epochs": int(epochs)}


def _share_of_steps(value: Any, theirs: Theirs, key: str) -> int:
    """Return steps; a value below 1 is a share of the run's, which is known where max_steps is."""
    if float(value) >= 1:
        return int(value)
    steps = int(theirs.get("max_steps"))
    if steps <= 0:
        raise ByHandError(f"{value:g} of the steps of the run, whose number only the data tells: set {key}")
    return round(float(value) * steps)


def _warmup(value: Any, theirs: Theirs) -> int:
    if not value:
        value = theirs.get("warmup_ratio")
    return _share_of_steps(value, theirs, "train.warmup_steps") if value else 0


def _save(value: Any, theirs: Theirs) -> dict[str, Any]:
    every: dict[str, Any] = {"checkpoint.every_steps": None}
    if value == "epoch":
        every["checkpoint.every_epochs"] = 1
    elif value == "steps":
        steps = _share_of_steps(theirs.get("save_steps"), theirs, "checkpoint.every_steps")
        every["checkpoint.every_steps"] = _batches(steps, theirs)
    return every


def _eval(value: Any, theirs: Theirs) -> dict[str, Any]:
    if value in (False, "no", None):
        return {}
    steps = theirs.get("eval_steps")
    if value == "epoch" or not steps:
        every = {"eval.every_epochs": 1}
    else:
        every = {"eval.every_steps": _batches(_share_of_steps(steps, theirs, "eval.every_steps"), theirs)}
    source = {"path": theirs.get("dataset_name"), "split": theirs.get("dataset_test_split", default="test")}
    return {**every, **{f"data.eval.{key}": own for key, own in {**source, **_columns(theirs)}.items()}}


def _columns(theirs: Theirs) -> dict[str, Any]:
    subset = theirs.get("dataset_config", default=_only(theirs.get("dataset_configs")))
    columns = {
        "prompt_field": theirs.get("dataset_prompt_column", default="prompt"),
        "answer_field": theirs.get("dataset_solution_column", default="solution"),
    }
    return columns | ({"subset": subset} if subset else {})


def _only(values: Any) -> Any:
    return values[0] if isinstance(values, list) and values else values


def _data(value: Any, theirs: Theirs) -> dict[str, Any]:
    source = {"path": value, "split": theirs.get("dataset_train_split", default="train"), **_columns(theirs)}
    return {f"data.train.{key}": own for key, own in source.items()}


def _rewards(value: Any, theirs: Theirs) -> list[dict[str, Any]]:
    names = value if isinstance(value, list) else [value]
    weights = theirs.get("reward_weights", default=[1.0] * len(names))
    known, missing = [], []
    for name, weight in zip(names, weights, strict=True):
        if name in _REWARDS:
            known.append({**_REWARDS[name], "weight": float(weight)})
        elif "." in name:  # a function by its dotted path, as TRL's command takes it
            known.append({"name": ":".join(name.rsplit(".", 1)), "weight": float(weight)})
        else:
            missing.append(name)
    if missing:
        raise RefusedError(
            f"no reward here is {', '.join(missing)}. Name it as module.function, or leave it out",
            rewards=known or [{"name": "math"}],
        )
    return known


def _graded_by(value: Any, theirs: Theirs) -> dict[str, Any]:
    rewards = _rewards(value, theirs)
    return {"rewards": rewards, "eval.reward": rewards[0]["name"]}


def _output(value: Any, _theirs: Theirs) -> dict[str, str]:
    path = PurePath(str(value))
    return {"run.root": str(path.parent), "run.name": path.name}


def _scaling(value: Any, theirs: Theirs) -> dict[str, Any]:
    if value == "batch":
        return {"loss.advantage": "reinforce_pp_baseline"}
    table = {True: True, "group": True, False: False, "none": False}
    return {"loss.normalize_std": choice(table, "scale_rewards")(value, theirs)}


def _loss(value: Any, theirs: Theirs) -> dict[str, Any]:
    """Choose the loss; with one ratio for a sequence it is divided as loss_type says."""
    chosen = dict(choice(_LOSSES, "loss_type")(value, theirs))
    if theirs.get("importance_sampling_level") != "sequence":
        return chosen
    if value not in ("grpo", "dapo"):
        reason = f"one ratio for a sequence goes with grpo or dapo here, not with {value}"
        raise RefusedError(reason, loss__name="gspo")
    return {**chosen, "loss.name": "gspo"}


def _clip(value: Any, theirs: Theirs) -> dict[str, Any]:
    """TRL bounds the ratio of cispo by epsilon_high itself, that of the others by 1 plus it; sapo has no bounds."""
    loss, high = theirs.get("loss_type"), float(theirs.get("epsilon_high", default=value))
    if loss == "sapo":
        return {}
    return {"loss.clip_low": 1.0, "loss.clip_high": high - 1.0} if loss == "cispo" else {
        "loss.clip_low": float(value), "loss.clip_high": high,
    }  # fmt: skip


def _correction(value: Any, theirs: Theirs) -> dict[str, Any]:
    if not theirs.get("use_vllm"):
        return {}  # transformers samples there, with nothing to correct; here vLLM does
    if not value:
        return {"loss.importance_correction": "none"}
    cap = float(theirs.get("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"))
    names = {"token_truncate": "truncated", "token_mask": "icepop", "sequence_truncate": "sequence",
             "sequence_mask": "sequence"}  # fmt: skip
    chosen = choice(names, "importance sampling")(theirs.get("vllm_importance_sampling_mode"), theirs)
    low = {"loss.importance_low": 0.0} if chosen == "icepop" else {}
    return {"loss.importance_correction": chosen, "loss.importance_cap": cap, **low}


def _reporters(value: Any, _theirs: Theirs) -> dict[str, Any]:
    names = value if isinstance(value, list) else [value]
    is_all = "all" in names
    return {
        "metrics.wandb_mode": "auto" if is_all or "wandb" in names else "disabled",
        "metrics.tensorboard": is_all or "tensorboard" in names,
    }


_DTYPES = {
    "bfloat16": "bfloat16",
    "float32": "float32",
    "auto": "bfloat16",
    "float16": RefusedError("float16 is not here"),
}

ROWS = (
    Row("output_dir run_name", convert=_output, default="runs/trl"),
    Row("seed", "run.seed", default=42),
    Row("model_name_or_path", "model.path"),
    Row("model_revision", convert=only("main", why="give the folder of that revision as model.path")),
    Row("torch_dtype dtype", "model.dtype", choice(_DTYPES, "dtype"), default="bfloat16"),
    Row("bf16 bf16_full_eval tf32", note="model.dtype"),
    Row("fp16", convert=only(False, why="float16 is not here: take bfloat16")),
    Row("attn_implementation", "train.attention", choice({"flash_attention_2": "flash_attention_2", "sdpa": "sdpa",
        "kernels-community/flash-attn": "flash_attention_2", "eager": "sdpa"}, "attention")),
    Row("trust_remote_code", convert=only(False, why="code that comes with a model is not run")),
    Row("use_peft load_in_4bit load_in_8bit", convert=only(False, why="adapters and quantised weights are not here")),
    Row("lora_*", note="of LoRA"),
    Row("dataset_name", convert=_data),
    Row("dataset_config dataset_configs dataset_prompt_column dataset_solution_column dataset_train_split "
        "dataset_test_split", convert=elsewhere, note="with the data set"),
    Row("system_prompt", "data.system_prompt"),
    Row("chat_template", convert=by_hand("its text as a Jinja file: data.chat_template")),
    Row("chat_template_kwargs", "data.template_args"),
    Row("max_prompt_length", "data.max_prompt_tokens", lambda value, _: value or 512, default=512,
        note="TRL cuts longer prompts, here they are dropped"),
    Row("shuffle_dataset", "data.shuffle", lambda value, _: value is not False),
    Row("reward_funcs", convert=_graded_by),
    Row("reward_weights", convert=elsewhere, note="rewards"),
    Row("num_generations", "rollout.group_size", default=8),
    Row("per_device_train_batch_size", convert=_batch, default=8,
        note="completions on each process there, prompts of a whole step here (give num_processes=N, accelerate's), "
             "and the tokens of a microbatch"),
    Row("num_iterations", "train.num_minibatches", _minibatches, default=1,
        note="generation_batch_size over the completions of an optimizer step"),
    Row("gradient_accumulation_steps", convert=elsewhere, note="rollout.prompts_per_step", default=1),
    Row("num_processes", convert=_processes, default=1,
        note="learners, which share their GPUs with engines where TRL's do; give num_processes=N, accelerate's own"),
    Row("generation_batch_size steps_per_generation", convert=elsewhere, note="rollout.prompts_per_step"),
    Row("max_completion_length", "rollout.max_new_tokens", default=512),
    Row("temperature", "rollout.temperature", default=1.0),
    Row("top_p", "rollout.top_p"),
    Row("top_k", convert=only(0, -1, why="top-k sampling is not here: use top_p")),
    Row("min_p", convert=only(0, 0.0, why="min-p sampling is not here: use top_p")),
    Row("repetition_penalty",
        convert=only(1, 1.0, why="sampling has no repetition penalty; the reward repetition is one")),
    Row("mask_truncated_completions", "rollout.mask_truncated"),
    Row("max_steps", convert=_length, default=-1, note="optimizer steps there, batches of rollouts here"),
    Row("num_train_epochs", convert=elsewhere, note="train.total_epochs", default=3),
    Row("learning_rate", "train.lr", default=1e-6),
    Row("lr_scheduler_type", "train.schedule", choice({"constant": "constant", "constant_with_warmup": "constant",
        "linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine"}, "learning-rate schedule"),
        default="linear"),
    Row("lr_scheduler_kwargs*", convert=by_hand("schedules end at 0 and have no settings: train.schedule, train.lr")),
    Row("warmup_steps", "train.warmup_steps", _warmup, default=0),
    Row("warmup_ratio", convert=elsewhere, note="train.warmup_steps", default=0.0),
    Row("weight_decay", "train.weight_decay", default=0.0),
    Row("adam_beta1", "train.betas", lambda value, theirs: [value, theirs.get("adam_beta2")], default=0.9),
    Row("adam_beta2", convert=elsewhere, note="train.betas", default=0.999),
    Row("adam_epsilon", "train.eps", default=1e-8),
    Row("optim", convert=only("adamw_torch", "adamw_torch_fused", "adamw", why="learners have AdamW alone")),
    Row("max_grad_norm", "train.max_grad_norm", default=1.0),
    Row("gradient_checkpointing", "train.gradient_checkpointing", default=True),
    Row("loss_type", convert=_loss, default="dapo"),
    Row("importance_sampling_level", convert=elsewhere, note="sequence: gspo", default="token"),
    Row("epsilon", convert=_clip, default=0.2),
    Row("epsilon_high", convert=elsewhere, note="loss.clip_high"),
    Row("delta", "loss.dual_clip"),
    Row("beta", "loss.kl_coef", default=0.0),
    Row("use_bias_correction_kl", "loss.kl_estimator", lambda value, _: "unbiased" if value else "k3"),
    Row("scale_rewards", convert=_scaling, default="group"),
    Row("sync_ref_model", "loss.ref_refresh_steps",
        lambda value, theirs: _batches(theirs.get("ref_model_sync_steps"), theirs) if value else None),
    Row("ref_model_sync_steps", convert=elsewhere, note="loss.ref_refresh_steps", default=512),
    Row("ref_model_mixup_alpha", "loss.ref_mixup",
        lambda value, theirs: value if theirs.get("sync_ref_model") else 1.0),
    Row("entropy_coef", "loss.entropy_coef"),
    Row("top_entropy_quantile", convert=only(1, 1.0, why="all tokens are trained on")),
    Row("vllm_importance_sampling_correction", convert=_correction, default=True),
    Row("vllm_importance_sampling_mode", convert=elsewhere, note="loss.importance_correction", default="sequence_mask"),
    Row("vllm_importance_sampling_cap", convert=elsewhere, note="loss.importance_cap"),
    Row("vllm_importance_sampling_clip_max", convert=elsewhere, note="loss.importance_cap", default=3.0),
    Row("use_vllm", note="sampling is always vLLM's", default=False),
    Row("vllm_gpu_memory_utilization", "engine.gpu_memory_utilization", shared_memory, default=0.3),
    Row("vllm_tensor_parallel_size vllm_mode vllm_device", convert=elsewhere, note="with num_processes"),
    Row("vllm_* use_transformers_paged cache_implementation",
        note="engines are started by the run: engine.engines_per_node"),
    Row("save_strategy", convert=_save, default="steps"),
    Row("save_steps", convert=elsewhere, note="checkpoint.every_steps", default=500),
    Row("save_total_limit", "checkpoint.keep_last", lambda value, _: value or 2),
    Row("eval_strategy", convert=_eval),
    Row("do_eval eval_steps per_device_eval_batch_size eval_on_start", convert=elsewhere, note="with eval_strategy"),
    Row("report_to", convert=_reporters),
    Row("wandb_project", "metrics.wandb_project"),
    Row("wandb_entity", "metrics.wandb_entity"),
    Row("num_completions_to_print log_completions log_unique_prompts", note="rollouts are always written"),
    Row("hub_* push_to_hub* log_* logging_* overwrite_* gradient_checkpointing_kwargs* callbacks benchmarks wandb_* "
        "dataloader_* remove_unused_columns disable_dropout ddp_* deepspeed fsdp* do_train resume_from_checkpoint "
        "disable_tqdm save_only_model eval_* label_names", note=_HUB),
)  # fmt: skip
