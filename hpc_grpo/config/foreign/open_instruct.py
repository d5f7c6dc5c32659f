"""open-instruct's options: those of open_instruct/grpo_fast.py, and of mason.py where it stands before it."""

from __future__ import annotations

from typing import Any

from hpc_grpo.config.foreign.allocation import node_shape
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

_AI2 = "of AI2's cluster, evaluation service and hub"
_KL = {name: estimator for number, estimator in enumerate(("k1", "k2", "k3", "unbiased"), 1)
       for name in (f"kl{number}", number - 1)}  # fmt: skip
"""By name, or by position from 0."""


def _mix(key: str, value: Any, splits: Any, theirs: Theirs) -> dict[str, Any]:
    """Read `NAME SHARE NAME SHARE`: a share with a point is one of the data set, a whole number counts its items."""
    words, splits = _as_list(value), _as_list(splits)
    if len(words) % 2:
        raise ByHandError("must be pairs of a data set and its share: set data.train")
    columns = {
        "messages_field": theirs.get("sft_messages_key", default="messages"),
        "answer_field": theirs.get("ground_truths_key", default="ground_truth"),
    }
    sources = []
    for place, (path, share) in enumerate(zip(words[::2], words[1::2], strict=True)):
        if isinstance(share, float) and share != 1.0:
            raise ByHandError(f"{share:g} of {path}: set max_items of that source to so many items")
        most = {} if isinstance(share, float) else {"max_items": int(share)}
        split = splits[place] if place < len(splits) else splits[-1] if splits else "train"
        sources.append({"path": path, "split": split, **columns, **most})
    if len(sources) == 1:
        return {f"{key}.{name}": own for name, own in sources[0].items()}
    return {f"{key}.mix": sources}


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _train_data(value: Any, theirs: Theirs) -> dict[str, Any]:
    return _mix("data.train", value, theirs.get("dataset_mixer_list_splits"), theirs)


def _eval_data(value: Any, theirs: Theirs) -> dict[str, Any]:
    return _mix("data.eval", value, theirs.get("dataset_mixer_eval_list_splits"), theirs)


def _eval_every(value: Any, theirs: Theirs) -> int | None:
    return int(value) if int(value) > 0 and theirs.get("dataset_mixer_eval_list") else None


def _lag(value: Any, theirs: Theirs) -> int:
    """open-instruct counts steps, we count their minibatches."""
    return 0 if _shares_gpu(theirs) else int(value) * int(theirs.get("num_mini_batches"))


def _shares_gpu(theirs: Theirs) -> bool:
    """Tell whether a learner and an engine take turns on one GPU: on request, and where there is but one."""
    return bool(theirs.get("single_gpu_mode")) or theirs.given.get("gpus") == 1


def _microbatch(value: Any, theirs: Theirs) -> int:
    return max(int(value), int(theirs.get("max_prompt_token_length")) + int(theirs.get("response_length")))


def _nodes(value: Any, theirs: Theirs) -> dict[str, Any]:
    """Learners and engines are counted in all there, and by mason's nodes and GPUs; each node has some of both here."""
    learners, engines = sum(map(int, _as_list(theirs.get("num_learners_per_node")))), int(value)
    tensor = int(theirs.get("vllm_tensor_parallel_size"))
    nodes = int(theirs.get("num_nodes", default=1))
    if _shares_gpu(theirs):
        return {"placement.colocate": True, "placement.learners_per_node": 1, "engine.engines_per_node": 1,
                "launch.num_nodes": 1, "launch.slurm.gpus_per_node": 1}  # fmt: skip
    gpus = int(theirs.get("gpus", default=0)) or -(-(learners + engines * tensor) // nodes)
    if learners + engines * tensor > nodes * gpus:
        most = nodes * gpus
        per_node = max(1, min(gpus - tensor, learners // nodes))
        raise RefusedError(
            f"{learners} learners and {engines} engines of {tensor} GPUs take {learners + engines * tensor}, and "
            f"{nodes} nodes of {gpus} have {most}",
            launch__num_nodes=nodes, launch__slurm__gpus_per_node=gpus, placement__learners_per_node=per_node,
            engine__tensor_parallel=tensor, engine__engines_per_node=max(1, (gpus - per_node) // tensor),
        )  # fmt: skip
    return node_shape(learners, engines, tensor, nodes, gpus)


def _rewards(value: Any, theirs: Theirs) -> list[dict[str, Any]]:
    rewards = []
    if value:
        rewards.append({"name": "correctness", "weight": float(theirs.get("verification_reward"))})
    if theirs.get("apply_r1_style_format_reward"):
        tags = {"reasoning_tag": "think", "answer_tag": "answer"}
        weight = float(theirs.get("r1_style_format_reward"))
        rewards.append({"name": "strict_format", "weight": weight, "args": tags})
    if not rewards:
        raise ByHandError("no reward is left: set rewards")
    return rewards


def _retired(value: Any, theirs: Theirs) -> dict[str, Any] | None:
    """Return a curriculum in which a prompt that is solved so often is not asked again. Rewards have their weights."""
    if value is None:
        return None
    return {"easy_from": float(value) * float(theirs.get("verification_reward")), "after": 1}


def _resampled(value: Any, _theirs: Theirs) -> dict[str, Any]:
    return {"rollout.dynamic_sampling": 10} if value else {"rollout.drop_zero_variance": True}


def _correction(value: Any, _theirs: Theirs) -> dict[str, Any]:
    if not value:
        return {"loss.importance_correction": "none"}
    return {"loss.importance_correction": "truncated", "loss.importance_cap": float(value)}


def _warmup(value: Any, theirs: Theirs) -> int:
    group = int(theirs.get("num_unique_prompts_rollout")) * int(theirs.get("num_samples_per_prompt_rollout"))
    ratio, updates = float(theirs.get("warmup_ratio")), int(theirs.get("num_mini_batches"))
    return int(value) or int(ratio * (int(theirs.get("total_episodes")) // group) * updates)


def _name(value: Any, theirs: Theirs) -> str:
    return str(theirs.get("run_name", default=value))


def _positive(value: Any, _theirs: Theirs) -> int | None:
    return int(value) if int(value) > 0 else None


_LOSSES = {"dapo": {"loss.name": "grpo"}, "cispo": {"loss.name": "cispo"}}

ROWS = (
    Row("exp_name", "run.name", _name, default="open-instruct"),
    Row("run_name", convert=elsewhere, note="run.name"),
    Row("output_dir", "run.root", note="the run is NAME below it, with all of it inside"),
    Row("seed", "run.seed", default=1),
    Row("model_name_or_path", "model.path", lambda value, _: str(value).strip()),
    Row("model_revision tokenizer_revision",
        convert=only("main", why="give the folder of that revision as model.path")),
    Row("tokenizer_name_or_path tokenizer_name", note="the tokenizer is that of model.path"),
    Row("dataset_mixer_list", convert=_train_data, note="a verifier for each item's `dataset` there, one reward here"),
    Row("dataset_mixer_eval_list", convert=_eval_data),
    Row("dataset_mixer_list_splits dataset_mixer_eval_list_splits ground_truths_key sft_messages_key",
        convert=elsewhere, note="with the data sets"),
    Row("max_prompt_token_length", "data.max_prompt_tokens", default=256, note="longer prompts are dropped"),
    Row("max_token_length", convert=lambda *_: {"data.drop_long_prompts": True}, default=None),
    Row("response_length", "rollout.max_new_tokens", default=256),
    Row("pack_length", "train.max_tokens_per_microbatch", _microbatch, default=512, note="at least one whole sequence"),
    Row("num_unique_prompts_rollout", "rollout.prompts_per_step", default=16),
    Row("num_samples_per_prompt_rollout", "rollout.group_size", default=4),
    Row("temperature", "rollout.temperature", default=0.7),
    Row("vllm_top_p", "rollout.top_p"),
    Row("stop_strings", convert=by_hand("completions end with the end token alone, not with a text")),
    Row("chat_template_name",
        convert=by_hand("its text, from open_instruct/dataset_transformation.py, as a Jinja file: data.chat_template")),
    Row("system_prompt_override_file", convert=by_hand("the file's text: data.system_prompt")),
    Row("user_prompt_transform", convert=by_hand("the text around a prompt: data.chat_template")),
    Row("async_steps", "rollout.max_policy_lag", _lag, default=1,
        note="open-instruct counts steps, here optimizer steps are counted; older rollouts are never trained on"),
    Row("async_mode", convert=only(True, why="set rollout.max_policy_lag: 0")),
    Row("inflight_updates", note="engines take weights between two of their steps; running completions go on"),
    Row("active_sampling", convert=_resampled, default=False,
        note="groups that teach nothing are left out, or replaced until 10 times prompts_per_step were sampled"),
    Row("filter_zero_std_samples", convert=elsewhere, note="rollout.drop_zero_variance"),
    Row("no_resample_solve_rate no_resampling_pass_rate no_resample_positive_rate", "data.curriculum", _retired,
        note="by the mean reward of one group"),
    Row("mask_truncated_completions", "rollout.mask_truncated"),
    Row("non_stop_penalty_value", note="with non_stop_penalty"),
    Row("non_stop_penalty", convert=by_hand("there is no penalty for a missing end: rollout.mask_truncated")),
    Row("num_mini_batches", "train.num_minibatches", default=1, note="minibatches are made of whole groups"),
    Row("num_epochs", convert=only(1, why="each rollout is trained on once")),
    Row("total_episodes", "train.total_episodes", default=100000, note="completions, as there"),
    Row("learning_rate", "train.lr", default=2e-5),
    Row("lr_scheduler_type", "train.schedule",
        choice({name: name for name in ("constant", "linear", "cosine")} | {"constant_with_warmup": "constant"},
               "learning-rate schedule"), default="linear"),
    Row("warm_up_steps", "train.warmup_steps", _warmup, default=0),
    Row("warmup_ratio", convert=elsewhere, note="train.warmup_steps", default=0.0),
    Row("weight_decay", "train.weight_decay", default=0.0),
    Row("max_grad_norm", "train.max_grad_norm", default=1.0),
    Row("adam_betas", "train.betas", default=[0.9, 0.999]),
    Row("beta", "loss.kl_coef", default=0.05),
    Row("load_ref_policy", note="a reference is there where loss.kl_coef is not 0"),
    Row("kl_estimator", "loss.kl_estimator", choice(_KL, "KL estimator"), default=2,
        note="counted from 0 there: 2 is k3; 3 is k1 times the ratio, here k3 times it: the same gradient on average"),
    Row("clip_lower", "loss.clip_low", default=0.2),
    Row("clip_higher", "loss.clip_high", default=0.2),
    Row("loss_fn", convert=choice(_LOSSES, "loss"), default="dapo"),
    Row("loss_denominator", "loss.denominator", choice({"token": "tokens"}, "loss denominator"), default="token"),
    Row("masked_mean_axis", convert=only(None, why="set loss.denominator: sequences for 1")),
    Row("truncated_importance_sampling_ratio_cap", convert=_correction, default=2.0),
    Row("use_vllm_logprobs", convert=only(False, why="proximal logprobs are the learners' own")),
    Row("advantage_normalization_type", "loss.normalize_std",
        choice({"standard": True, "centered": False}, "advantage"),
        default="standard"),
    Row("ref_policy_update_freq", "loss.ref_refresh_steps", _positive),
    Row("alpha", "loss.ref_mixup"),
    Row("apply_verifiable_reward", "rewards", _rewards, default=True,
        note="answers are compared as mathematics; code, instructions and judges are rewards of their own names"),
    Row("verification_reward", convert=elsewhere, note="its weight", default=10.0),
    Row("apply_r1_style_format_reward additive_format_reward", convert=elsewhere, note="strict_format"),
    Row("r1_style_format_reward", convert=elsewhere, note="its weight", default=1.0),
    Row("llm_judge_* code_api_url code_*", convert=by_hand("a reward of its own: rewards.N.name = llm_judge, or code")),
    Row("tools tool_* env_* max_steps", convert=by_hand("episodes have one turn and no tools here")),
    Row("vllm_num_engines", convert=_nodes, default=1,
        note="counted in all there, on each node here; with them num_learners_per_node and mason's num_nodes and gpus"),
    Row("num_learners_per_node", convert=elsewhere, note="placement.learners_per_node", default=1),
    Row("vllm_tensor_parallel_size", convert=elsewhere, note="engine.tensor_parallel", default=1),
    Row("num_nodes gpus", convert=elsewhere, note="launch.num_nodes, launch.slurm.gpus_per_node"),
    Row("single_gpu_mode", convert=elsewhere, note="placement.colocate"),
    Row("sequence_parallel_size", convert=only(1, why="sequence parallelism in training is not here")),
    Row("use_peft use_lora use_qlora", convert=only(False, why="LoRA is not here: all weights learn")),
    Row("load_in_4bit load_in_8bit use_fp8_kv_cache", convert=only(False, why="quantised weights are not here")),
    Row("vllm_gpu_memory_utilization", "engine.gpu_memory_utilization",
        lambda value, theirs: shared_memory(value, theirs) if _shares_gpu(theirs) else value, default=0.9),
    Row("vllm_enforce_eager", "engine.enforce_eager"),
    Row("vllm_enable_prefix_caching", "engine.prefix_caching"),
    Row("vllm_sync_backend vllm_*", note="weights go through shared memory and Gloo"),
    Row("deepspeed_stage", "train.zero_stage", lambda value, _: max(1, int(value)), default=0,
        note="ZeRO 1 at least"),
    Row("deepspeed_offload_optimizer", "train.offload_optimizer", lambda value, _: "cpu" if value else "none"),
    Row("deepspeed_*", note="ZeRO's stage and offload are all that is chosen: train.zero_stage"),
    Row("gradient_checkpointing", "train.gradient_checkpointing"),
    Row("per_device_train_batch_size", note="a microbatch is a budget of tokens: train.max_tokens_per_microbatch"),
    Row("local_eval_every", "eval.every_steps", _eval_every, default=100),
    Row("eval_on_step_0", note="with an eval there is one before training, too"),
    Row("eval_pass_at_k", "eval.num_samples"),
    Row("eval_temperature", "eval.temperature"),
    Row("save_freq", "checkpoint.export_every_steps", _positive, default=-1),
    Row("checkpoint_state_freq", "checkpoint.every_steps", _positive, default=-1),
    Row("keep_last_n_checkpoints", "checkpoint.keep_exports", _positive, default=3),
    Row("with_tracking", "metrics.wandb_mode", lambda value, _: "auto" if value else "disabled", default=False),
    Row("wandb_project_name wandb_project", "metrics.wandb_project"),
    Row("wandb_entity", "metrics.wandb_entity"),
    Row("push_to_hub hf_*", note="exports stay in the run directory"),
    Row("save_traces", note="rollouts are always written: rollout.logged_fraction"),
    Row("task_name cluster workspace priority pure_docker_mode image preemptible budget env description max_retries "
        "oe_eval_* try_launch_beaker_eval_jobs* try_auto_save_to_beaker eval_priority gs_* no_auto_dataset_cache "
        "auto_output_dir_path auto_checkpoint_state_dir checkpoint_state_dir dataset_local_cache_dir "
        "dataset_skip_cache timeout verbose active_fill_completions add_bos add_seed_and_date_to_exp_name "
        "dataset_cache_mode dataset_transform_fn backend_timeout tokenizer_* remap_verifier", note=_AI2),
)  # fmt: skip
