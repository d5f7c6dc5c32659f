"""Translate TRL's keys: GRPOConfig with transformers' TrainingArguments, arguments of `trl grpo`, open-r1's recipes.

Defaults are those of trl 1.16.0 and transformers 5.19.0. TRL's formulas are in trl/trainer/grpo_trainer.py.
"""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Any

from hpc_grpo.foreign import table
from hpc_grpo.foreign.table import ByHandError, Differs, RefusedError, Row, Theirs, below, by_hand, choice, only

_REWARDS: dict[str, dict[str, Any]] = {
    "accuracy": {"name": "math"},
    "accuracy_reward": {"name": "math"},
    "format": {"name": "strict_format", "args": {"reasoning_tag": "think", "answer_tag": "answer"}},
    "repetition_penalty": {"name": "repetition"},
}
"""Names of rewards in open-r1 and TRL -> our rewards."""
_CLIPPED = {"grpo": "sequences", "dapo": "tokens", "bnpo": "tokens", "dr_grpo": "constant", "luspo": 1}
"""Names of TRL's losses with the clipped surrogate -> our loss.denominator."""
_CORRECTIONS = {"token_truncate": "truncated", "token_mask": "icepop", "sequence_truncate": "sequence",
                "sequence_mask": "sequence_mask"}  # fmt: skip


def _completions(theirs: Theirs) -> int:
    """Count the completions of one optimizer step, over all processes."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
    return math.prod(int(theirs.get(name)) for name in names)


def _generated(theirs: Theirs) -> int:
    """Count the completions that are sampled together. Default: those of one optimizer step."""
    whole, per = theirs.get("generation_batch_size"), theirs.get("steps_per_generation")
    of_processes = int(theirs.get("per_device_train_batch_size")) * int(theirs.get("num_processes"))
    return int(whole) if whole else of_processes * int(per) if per else _completions(theirs)


def _prompts(theirs: Theirs) -> int:
    return max(1, _generated(theirs) // int(theirs.get("num_generations")))


def _updates(theirs: Theirs) -> int:
    """Count the optimizer steps for each batch of rollouts."""
    updates = max(1, min(_generated(theirs) // _completions(theirs), _prompts(theirs)))
    return updates if int(theirs.get("num_iterations")) == 1 else 1


def _minibatches(value: Any, theirs: Theirs) -> Any:
    if int(value) != 1:
        raise RefusedError("each rollout is trained on once (num_iterations)", {"train.num_minibatches": 1})
    return table.whole_groups(_updates(theirs), "shuffled completions")


def _longest_prompt(theirs: Theirs) -> int:
    context, longest = theirs.get("vllm_max_model_length"), theirs.get("max_prompt_length")
    if longest is None and context is not None:
        return int(context) - int(theirs.get("max_completion_length"))
    return int(longest or 512)


def _prompt_length(value: Any, theirs: Theirs) -> Any:
    keys: dict[str, Any] = {"data.max_prompt_tokens": _longest_prompt(theirs)}
    if value is None:
        return Differs(keys, "TRL 1.16 bounds no prompt; here a longer prompt ends the run with an error")
    note = "older TRL keeps the last tokens of a longer prompt; here the prompt is dropped and counted"
    return Differs({**keys, "data.drop_long_prompts": True}, note)


def _batch(value: Any, theirs: Theirs) -> dict[str, Any]:
    longest = _longest_prompt(theirs) + int(theirs.get("max_completion_length"))
    return {"rollout.prompts_per_step": _prompts(theirs), "train.max_tokens_per_microbatch": int(value) * longest}


def _processes(value: Any, theirs: Theirs) -> dict[str, Any]:
    """Return our placement. TRL's engines share its processes' GPUs, unless it has a vLLM server or device for them."""
    learners = {"placement.learners_per_node": int(value)}
    if theirs.get("vllm_mode") == "server" or theirs.get("vllm_device"):
        return {**learners, "engine.tensor_parallel": int(theirs.get("vllm_tensor_parallel_size")),
                "engine.engines_per_node": 1}  # fmt: skip
    return {**learners, "placement.colocate": True, "engine.engines_per_node": int(value)}


def _batches(steps: Any, theirs: Theirs, key: str) -> Differs:
    """Convert TRL's optimizer steps to our steps, batches of rollouts. The note is empty if they divide evenly."""
    updates = _updates(theirs)
    batches, exact = max(1, round(int(steps) / updates)), int(steps) / updates
    note = "" if batches == exact else f"{steps} optimizer steps are {exact:g} batches of {updates}"
    return Differs({key: batches}, note)


def _length(value: Any, theirs: Theirs) -> Any:
    if int(value) > 0:
        return _batches(value, theirs, "train.total_steps")
    epochs = float(theirs.get("num_train_epochs"))
    if epochs != int(epochs) or epochs < 1:
        raise ByHandError(f"{epochs:g} epochs are no positive whole number", "train.total_steps")
    return {"train.total_epochs": int(epochs)}


def _share_of_steps(value: Any, theirs: Theirs, key: str) -> int:
    """Return optimizer steps. A value below 1 is a share of the run's steps, known only with max_steps."""
    if not value or float(value) >= 1:
        return int(value or 0)
    return math.ceil(table.share_of_steps(value, max(0, int(theirs.get("max_steps"))), key))


def _every(steps: Any, theirs: Theirs, key: str) -> Differs:
    return _batches(_share_of_steps(steps, theirs, key), theirs, key)


def _save(value: Any, theirs: Theirs) -> Any:
    if value == "steps":
        return _every(theirs.get("save_steps"), theirs, "checkpoint.every")
    return {"checkpoint.every": "1 epoch" if value == "epoch" else None}


def _source(key: str, theirs: Theirs, split: str) -> dict[str, Any]:
    configs = table.as_list(theirs.get("dataset_configs"))
    subset = theirs.get("dataset_config", default=configs[0] if configs else None)
    source = {"path": theirs.get("dataset_name"), "split": theirs.get(split),
              "prompt_field": theirs.get("dataset_prompt_column"),
              "answer_field": theirs.get("dataset_solution_column")}  # fmt: skip
    return below(key, source | ({"subset": subset} if subset else {}))


def _eval(value: Any, theirs: Theirs) -> Any:
    """Return our keys of evals. TRL's eval samples with the settings of training."""
    if value in (False, "no", None):
        return {}
    common = _source("data.eval", theirs, "dataset_test_split") | {
        "eval.num_samples": int(theirs.get("num_generations_eval", "num_generations")),
        "eval.temperature": float(theirs.get("temperature")),
    }
    steps = theirs.get("eval_steps")
    if value == "epoch" or not steps:
        return {**common, "eval.every": "1 epoch"}
    every = _every(steps, theirs, "eval.every")
    return Differs({**common, **every.ours}, every.note)


def _graded_by(value: Any, theirs: Theirs) -> Any:
    if value in (None, []):
        raise ByHandError("TRL's command needs reward_funcs; a script gives them in Python", "rewards")
    names = table.as_list(value)
    weights = theirs.get("reward_weights", default=[1.0] * len(names))
    # TRL's command names a function by its dotted path.
    rewards = {name: _REWARDS.get(name, {"name": ":".join(name.rsplit(".", 1))}) for name in names}
    missing = [name for name in names if name not in _REWARDS and "." not in name]
    known = [{**rewards[name], "weight": float(weight)} for name, weight in zip(names, weights, strict=True)
             if name not in missing]  # fmt: skip
    if missing:
        raise RefusedError(f"there is no reward {', '.join(missing)}. Name it as module.function, or leave it out",
                           {"rewards": known or [{"name": "math"}]})  # fmt: skip
    ours = "our functions score here, such as math, strict_format (no text outside of the elements)"
    note = ours if {*names} & {*_REWARDS} else "a function is called as f(prompts, completions, **columns), with texts"
    return Differs({"rewards": known, "eval.reward": known[0]["name"]}, note)


def _output(value: Any, theirs: Theirs) -> dict[str, str]:
    path = PurePath(str(value or theirs.get("run_name") or "runs/trl"))
    return {"run.root": str(path.parent), "run.name": path.name}


def _dtype(_value: Any, theirs: Theirs) -> str:
    """Return our dtype. TRL's load dtype matters only without bf16: by default its forward pass is in bfloat16."""
    loaded, is_mixed = str(theirs.get("torch_dtype", "dtype")), theirs.get("bf16", default=True)
    if theirs.get("fp16") or loaded == "float16":
        raise RefusedError("float16 is not supported: use bf16", {"model.dtype": "bfloat16"})
    return "float32" if loaded == "float32" and not is_mixed else "bfloat16"


def _loss(value: Any, theirs: Theirs) -> Any:
    """Choose the loss with its clip and its denominator. `sequence` means one ratio for each sequence."""
    by_sequence = theirs.get("importance_sampling_level") == "sequence"
    low, high = float(theirs.get("epsilon")), float(theirs.get("epsilon_high", "epsilon"))
    if value in ("cispo", "sapo") and by_sequence:
        raise RefusedError(f"one ratio for a sequence is not supported with {value}, only with clipped losses", {
            "loss.name": value})  # fmt: skip
    if value == "sapo":
        taus = {"temperature_positive": "sapo_temperature_pos", "temperature_negative": "sapo_temperature_neg"}
        own = below("loss.args", {ours: float(theirs.get(name)) for ours, name in taus.items()})
        return _by_sequence_mean(theirs, {"loss.name": "sapo", "loss.denominator": "sequences", **own})
    if value == "cispo":
        if high < 1:
            raise RefusedError(
                f"TRL's cispo weighs by min(r, epsilon_high) with epsilon_high = {high:g}: less than 1 would scale all "
                f"tokens down. Set epsilon_high above 1, such as its paper's 5", {"loss.name": "cispo"})  # fmt: skip
        return _by_window(theirs, {"loss.name": "cispo", "loss.denominator": "tokens", "loss.clip_low": 1.0,
                                   "loss.clip_high": high - 1.0})  # fmt: skip
    denominator = choice(_CLIPPED, "loss_type")(value)
    name = "gspo" if by_sequence else value if value in ("bnpo", "dr_grpo") else "grpo"
    chosen = {"loss.name": name, "loss.denominator": denominator, "loss.clip_low": low, "loss.clip_high": high}
    if (delta := theirs.get("delta")) is not None:
        if float(delta) < 1 + high:
            raise RefusedError(f"for a negative advantage TRL has max(min(r, delta), clip(r)), and we have min(max(r, "
                               f"clip(r)), dual_clip). These are equal if delta is at least 1 + epsilon_high = "
                               f"{1 + high:g}, but delta = {delta} is less", chosen)  # fmt: skip
        chosen["loss.args.dual_clip"] = float(delta)
    if value == "luspo" and not by_sequence:
        raise RefusedError("luspo needs importance_sampling_level: sequence", {**chosen, "loss.name": "gspo"})
    if value == "bnpo":
        return Differs(chosen, "divided by the tokens of each microbatch there, and averaged; divided by the tokens of "
                               "the optimizer step here")  # fmt: skip
    return _by_window(theirs, chosen) if value == "dapo" else _by_sequence_mean(theirs, chosen)


def _by_window(theirs: Theirs, ours: dict[str, Any]) -> Any:
    note = "divided by the minibatches' mean number of tokens there, by each minibatch's own tokens here"
    return ours if _updates(theirs) == 1 else Differs(ours, note)


def _by_sequence_mean(theirs: Theirs, ours: dict[str, Any]) -> Any:
    note = "divided by the number of all completions there, by the number of unmasked completions here"
    return Differs(ours, note) if theirs.get("mask_truncated_completions") else ours


def _kl(value: Any, theirs: Theirs) -> Any:
    if not value:
        return {"loss.kl.coef": 0.0}
    if not theirs.get("use_bias_correction_kl"):
        return {"loss.kl.coef": float(value), "loss.kl.estimator": "k3"}
    keys = {"loss.kl.coef": float(value), "loss.kl.estimator": "unbiased"}
    if theirs.get("importance_sampling_level") == "sequence":
        raise RefusedError("the KL times a sequence's ratio is not supported: set use_bias_correction_kl to false",
                           keys)  # fmt: skip
    return Differs(keys, "r * k3 there; here w * r * k3, with w of loss.correction: equal if that is none")


def _refresh(value: Any, theirs: Theirs) -> Any:
    if not value:
        return {}
    every = _batches(theirs.get("ref_model_sync_steps"), theirs, "loss.kl.refresh_steps")
    return Differs({**every.ours, "loss.kl.mixup": float(theirs.get("ref_model_mixup_alpha"))}, every.note)


def _correction(value: Any, theirs: Theirs) -> Any:
    """Return our correction for vLLM's logprobs. TRL without vLLM samples by transformers, and corrects nothing."""
    if not theirs.get("use_vllm"):
        return Differs({"loss.correction.name": "truncated"}, "transformers sample there, with the learner's own "
                       "logprobs; here vLLM does, and min(learner / engine, 2) weighs its tokens")  # fmt: skip
    if not value:
        return {"loss.correction.name": "none"}
    cap, low = (theirs.get(f"vllm_importance_sampling_{key}") for key in ("cap", "clip_min"))
    high = theirs.exact("vllm_importance_sampling_clip_max") if cap is None else cap
    chosen = choice(_CORRECTIONS, "importance sampling")(theirs.get("vllm_importance_sampling_mode"))
    keys = {"loss.correction.name": chosen, "loss.correction.args.cap": 1e9 if high is None else float(high)}
    if chosen in ("icepop", "sequence_mask"):
        return {**keys, "loss.correction.args.low": float(low or 0.0)}
    if low is not None:
        raise RefusedError("a truncated weight has no lower bound here (vllm_importance_sampling_clip_min)", keys)
    return keys


ROWS = (
    Row("output_dir", convert=_output, default=None, also={"run_name": None}),
    Row("seed", "run.seed", default=42),
    Row("model_name_or_path", "model.path"),
    Row("model_revision", convert=only("main", why="give the folder of that revision as model.path")),
    Row("model_init_kwargs model_init_kwargs.*", convert=by_hand("give a folder with the model that these load",
        "model.path")),
    Row("dtype torch_dtype", "model.dtype", _dtype, default="float32", also={"bf16": None, "fp16": False}),
    Row("cast_lm_head_to_fp32", "model.head_dtype", lambda value, _: "float32" if value else "model", default=False),
    Row("attn_implementation", "train.attention", choice(
        {"flash_attention_2": "flash_attention_2", "sdpa": "sdpa", None: "sdpa", "eager": "sdpa",
         "kernels-community/flash-attn": "flash_attention_2"}, "attention")),
    Row("use_cpu", "model.device", lambda value, _: "cpu" if value else "auto"),
    Row("trust_remote_code", convert=only(False, why="code that comes with a model is not run")),
    Row("use_peft", convert=table.lora("lora_r", "lora_alpha", "lora_target_modules"),
        also={"lora_r": 16, "lora_alpha": 32, "lora_target_modules": None}),
    Row("load_in_4bit load_in_8bit", convert=only(False, why="quantised weights are not supported")),
    Row("use_rslora use_dora", convert=only(False, why="only plain LoRA is supported: scale lora.alpha / lora.rank")),
    Row("lora_modules_to_save lora_target_parameters", convert=only(why="only linear layers get adapters")),
    Row("lora_* bnb_4bit_* use_bnb_nested_quant", note="part of use_peft or of quantised weights"),
    Row("dataset_name",
        convert=lambda value, theirs: _source("data.train", theirs, "dataset_train_split") if value else {},
        also={"dataset_config": None, "dataset_configs": None, "dataset_prompt_column": "prompt",
              "dataset_solution_column": "solution", "dataset_train_split": "train", "dataset_test_split": "test"}),
    Row("datasets", convert=by_hand("list the data sets", "data.train.mix")),
    Row("dataset_streaming streaming", note="data sets are read completely"),
    Row("test_split_size", convert=by_hand("hold out a share of the data", "data.held_out")),
    Row("system_prompt", "data.system_prompt"),
    Row("chat_template", convert=by_hand("write this text into a Jinja file", "data.template")),
    Row("chat_template_kwargs chat_template_kwargs.*", "data.template_args",
        lambda _, theirs: theirs.section("chat_template_kwargs")),
    Row("max_prompt_length", convert=_prompt_length, default=None, also={"vllm_max_model_length": None}),
    Row("shuffle_dataset", "data.shuffle", lambda value, _: value is not False),
    Row("data_seed", convert=only(None, why="the order of prompts follows from run.seed")),
    Row("train_sampling_strategy", convert=only("random", why="prompts come in random order, or in the data's order")),
    Row("reward_funcs", convert=_graded_by, default=None, also={"reward_weights": None}),
    Row("reward_model_name_or_path",
        convert=only(None, why="a reward model is a server here: rewards.0.name = remote")),
    Row("num_generations", "rollout.group_size", default=8),
    Row("per_device_train_batch_size", convert=_batch, default=8,
        also={"gradient_accumulation_steps": 1, "generation_batch_size": None, "steps_per_generation": None}),
    Row("num_iterations", "train.num_minibatches", _minibatches, default=1),
    Row("num_processes", convert=_processes, default=1,
        also={"vllm_mode": "colocate", "vllm_device": None, "vllm_tensor_parallel_size": 1},
        note="accelerate's option: give num_processes=N. Learners share GPUs with engines if TRL's processes do"),
    Row("max_completion_length", "rollout.max_new_tokens", lambda value, _: value or 512, default=512),
    Row("temperature", "rollout.temperature", default=1.0),
    Row("top_p", "rollout.top_p", default=1.0),
    Row("top_k", convert=only(0, -1, why="top-k sampling is not supported: use top_p")),
    Row("min_p", convert=only(0, 0.0, why="min-p sampling is not supported: use top_p")),
    Row("generation_kwargs.stop", "rollout.stop", lambda value, _: table.as_list(value)),
    Row("generation_kwargs generation_kwargs.* vllm_structured_outputs_regex",
        convert=only({}, why="further sampling settings, such as structured outputs, are not supported")),
    Row("repetition_penalty",
        convert=only(1, 1.0, why="sampling has no repetition penalty; the reward repetition is one")),
    Row("max_tool_calling_iterations",
        convert=only(why="tools are an environment here: set environment.max_turns yourself")),
    Row("mask_truncated_completions", "rollout.mask_truncated", table.differs(
        "counted in a group's mean and deviation there; left out of both here"), default=False),
    Row("max_steps", convert=_length, default=-1, also={"num_train_epochs": 3.0}),
    Row("learning_rate", "train.lr", default=1e-6),
    Row("lr_scheduler_type", "train.schedule", lambda value, theirs: table.schedule(
        value, "lr_scheduler_kwargs are ignored: cosine is half a wave that ends at 0"
        if theirs.has("lr_scheduler_kwargs") else ""), default="linear"),
    Row("lr_scheduler_kwargs*", note="see lr_scheduler_type"),
    Row("warmup_steps", "train.warmup_steps", lambda value, theirs: _share_of_steps(
        value or theirs.get("warmup_ratio"), theirs, "train.warmup_steps"), default=0, also={"warmup_ratio": None}),
    Row("weight_decay", "train.adamw.weight_decay", default=0.0),
    Row("adam_beta1", "train.adamw.betas", lambda value, theirs: [value, theirs.get("adam_beta2")], default=0.9,
        also={"adam_beta2": 0.999}),
    Row("adam_epsilon", "train.adamw.eps", default=1e-8),
    Row("optim optim_args optim_args.* optim_target_modules", convert=only(
        "adamw_torch", "adamw_torch_fused", "adamw", why="learners only have AdamW")),
    Row("max_grad_norm", "train.max_grad_norm", default=1.0),
    Row("label_smoothing_factor neftune_noise_alpha", convert=only(
        0, why="the loss has no label smoothing, and embeddings get no noise")),
    Row("router_aux_loss_coef", "train.router_aux_loss_coef", lambda value, _: Differs(
        value, "over all tokens of a microbatch there, over each sequence here") if value else 0.0),
    Row("gradient_checkpointing", "train.gradient_checkpointing", default=True),
    Row("loss_type", convert=_loss, default="dapo",
        also={"importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": None, "delta": None,
              "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}),
    Row("beta", convert=_kl, default=0.0, also={"use_bias_correction_kl": True}),
    Row("scale_rewards", convert=choice({"batch": {"loss.advantage.name": "group_step_std"}, **{own: {
        "loss.advantage.name": "group", "loss.advantage.normalize_std": own in (True, "group")}
        for own in (True, "group", False, "none")}}, "scale_rewards"), default="group"),
    Row("multi_objective_aggregation", convert=only(
        "sum_then_normalize", why="rewards are always summed first, then normalised")),
    Row("sync_ref_model", convert=_refresh, default=False,
        also={"ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6}),
    Row("entropy_coef", convert=lambda value, _: Differs(
        {"loss.entropy_coef": float(value)}, "a mean over tokens there; here divided as loss.denominator says")
        if value else {}, default=0.0),
    Row("use_adaptive_entropy", convert=only(False, why="the entropy's coefficient is constant")),
    Row("entropy_coef_* entropy_target vespo_*",
        note="read only with a refused value: use_adaptive_entropy, loss_type vespo"),
    Row("top_entropy_quantile", convert=only(1, 1.0, why="all tokens are trained on")),
    Row("off_policy_mask_threshold", convert=only(why="sequences are not masked by their KL to the engine here")),
    Row("vllm_importance_sampling_correction", convert=_correction, default=True,
        also={"use_vllm": False, "vllm_importance_sampling_mode": "sequence_mask",
              "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None,
              "vllm_importance_sampling_cap": None}),
    Row("vllm_gpu_memory_utilization", "engine.vllm.gpu_memory_utilization", table.shared_memory, default=0.3),
    Row("vllm_enable_sleep_mode vllm_group_port vllm_model_impl vllm_server_* cache_implementation "
        "use_transformers_* transformers_continuous_batching_config ds3_gather_for_generation",
        note="the run starts its engines itself: engine.engines_per_node"),
    Row("save_strategy", convert=_save, default="steps", also={"save_steps": 500}),
    Row("save_total_limit", "checkpoint.keep_last", table.kept, default=None),
    Row("load_best_model_at_end", convert=only(False, why="the final export has the last step's weights")),
    Row("eval_strategy", convert=_eval, default="no", also={"eval_steps": None, "num_generations_eval": None}),
    Row("report_to", convert=table.reporters, default="none"),
    Row("wandb_project", "metrics.wandb.project"),
    Row("wandb_entity", "metrics.wandb.entity"),
    Row("num_completions_to_print log_completions log_unique_prompts log_multimodal log_completions_hub_repo",
        note="rollouts are always written"),
    Row("do_eval do_train do_predict eval_on_start eval_delay per_device_eval_batch_size eval_accumulation_steps "
        "eval_do_concat_batches eval_use_gather_object prediction_loss_only include_for_metrics batch_eval_metrics "
        "metric_for_best_model greater_is_better",
        note="if there are evals, one runs before training too; batches need no key"),
    Row("hub_* push_to_hub* log_level* log_on_each_node logging_* overwrite_output_dir callbacks benchmarks wandb_* "
        "trackio_* project disable_tqdm save_only_model save_on_each_node resume_from_checkpoint debug "
        "skip_memory_metrics restore_callback_states_from_checkpoint include_num_input_tokens_seen",
        note="part of the hub and of logging; the same command resumes a run"),
    Row("bf16_full_eval fp16_full_eval tf32 accelerator_config* parallelism_config* average_tokens_across_devices "
        "auto_find_batch_size ddp_* deepspeed* fsdp* full_determinism gradient_checkpointing_kwargs* "
        "ignore_bias_buffers liger_kernel_config use_liger_kernel local_rank pad_to_multiple_of torch_compile* "
        "torch_empty_cache_steps use_cache enable_jit_checkpoint disable_dropout dataloader_* remove_unused_columns "
        "label_names length_column_name ignore_data_skip",
        note="part of transformers' trainer or data loader; here DeepSpeed's ZeRO, packed sequences, no dropout"),
)  # fmt: skip
