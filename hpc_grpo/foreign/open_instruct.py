"""Translate open-instruct's options: those of open_instruct/grpo_fast.py, and those of its launcher mason.py.

Defaults are those of open-instruct at e6c3044 (August 2026). open_instruct/grpo_utils.py and data_loader.py have the
defaults and the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_grpo.foreign import table
from hpc_grpo.foreign.reading import read_options
from hpc_grpo.foreign.table import ByHandError, Differs, RefusedError, Row, Theirs, below, by_hand, choice, only

OLDER_DEFAULTS: dict[str, Any] = {
    "seed": 1, "temperature": 0.7, "async_steps": 1, "advantage_normalization_type": "standard", "clip_higher": 0.2,
    "use_rho_correction": False, "checkpoint_state_freq": -1, "output_dir": "output",
    "dataset_mixer_eval_list": ["ai2-adapt-dev/rlvr_gsm8k_zs", 1.0],
}  # fmt: skip
"""Defaults of older versions that differ, such as the fork of GeodesicResearch at f3a71b4 (February 2026)."""
OLDER_KEYS = ("truncated_importance_sampling_ratio_cap", "wandb_project_name", "warm_up_steps")

_KL = {"kl1": "k1", "kl2": "k2", "kl3": "k3", "kl4": "unbiased", 0: "k1", 1: "k2", 2: "k3", 3: "unbiased"}
_TEMPLATES = ("simple_", "assistant_message_only", "zephyr", "olmo", "tulu", "r1_simple_chat")
"""Prefixes of open-instruct's own chat templates. Any other name means the tokenizer's template."""
_VERIFIERS = "a verifier for each item's `dataset` there, answers as mathematics here"


def read(words: Sequence[str]) -> dict[str, Any]:
    """Read options. `--no_KEY` sets KEY to false, as for HfArgumentParser."""
    off = {f"no_{name}": name for row in ROWS for name in (*row.names, *row.also)}
    return {off.get(key, key): key not in off and value for key, value in read_options(words).items()}


def of_training_args(given: Mapping[str, Any], nodes: int = 1, gpus: int | None = None) -> dict[str, Any]:
    """Return the options of the fork on Slurm, which come from TRAINING_ARGS and from the job's number of nodes.

    A single number of learners applies to every node, and engines get the node's other GPUs. `gpus` is a node's number
    of GPUs, if known.
    """
    options = {OLDER_KEYS[0]: 0.0, "wandb_project_name": "geodesic-grpo", "wandb_entity": "geodesic", **given}
    learners = table.as_list(given.get("num_learners_per_node", 1))
    if len(learners) > 1:
        return {**options, "num_nodes": len(learners)} | ({"gpus": gpus} if gpus else {})
    options |= {"num_nodes": nodes, "num_learners_per_node": learners * nodes}
    if gpus:
        engines = (gpus - int(learners[0])) // int(given.get("vllm_tensor_parallel_size", 1))
        options |= {"gpus": gpus, "vllm_num_engines": nodes * engines}
    return options


def _mix(key: str, value: Any, splits: Any, theirs: Theirs) -> dict[str, Any]:
    """Return our sources for `NAME SHARE NAME SHARE`. A share with a decimal point is a fraction, else a count."""
    words, splits = table.as_list(value), table.as_list(splits)
    if len(words) % 2:
        raise ByHandError("the list must be pairs of a data set and its share", key)
    columns = {"messages_field": theirs.get("sft_messages_key"), "answer_field": theirs.get("ground_truths_key")}
    sources = []
    for place, (path, share) in enumerate(zip(words[::2], words[1::2], strict=True)):
        if isinstance(share, float) and share != 1.0:
            raise ByHandError(f"give {share:g} of {path} as a number, max_items of that source", key)
        most = {} if isinstance(share, float) else {"max_items": int(share)}
        sources.append({"path": path, "split": splits[min(place, len(splits) - 1)], **columns, **most})
    return below(key, sources[0]) if len(sources) == 1 else {f"{key}.mix": sources} if sources else {}


def _shares_gpu(theirs: Theirs) -> bool:
    """Return whether a learner and an engine share one GPU: on request, or if there is only one GPU."""
    return bool(theirs.get("single_gpu_mode")) or theirs.get("gpus") == 1


def _lag(value: Any, theirs: Theirs) -> Any:
    """Return the lag in optimizer steps; open-instruct counts it in steps."""
    if _shares_gpu(theirs):
        return Differs(0, "learner and engine take turns on one GPU here: rollouts are of the newest weights")
    return int(value) * int(theirs.get("num_mini_batches"))


def _nodes(value: Any, theirs: Theirs) -> dict[str, Any]:
    """Return learners and engines per node. open-instruct counts both in total; mason counts nodes and GPUs."""
    if _shares_gpu(theirs):
        return {"placement.colocate": True, "placement.learners_per_node": 1, "engine.engines_per_node": 1,
                "launch.num_nodes": 1, "launch.slurm.gpus_per_node": 1}  # fmt: skip
    learners, engines = sum(map(int, table.as_list(theirs.get("num_learners_per_node")))), int(value)
    tensor, nodes = int(theirs.get("vllm_tensor_parallel_size")), int(theirs.get("num_nodes"))
    gpus = int(theirs.get("gpus", default=0)) or -(-(learners + engines * tensor) // nodes)
    return table.node_shape(learners, engines, tensor, nodes, gpus)


def _rewards(value: Any, theirs: Theirs) -> Any:
    correct = {"name": "correctness", "weight": float(theirs.get("verification_reward"))}
    form = {"name": "strict_format", "weight": float(theirs.get("r1_style_format_reward")),
            "args": {"reasoning_tag": "think", "answer_tag": "answer"}}  # fmt: skip
    has_format = theirs.get("apply_r1_style_format_reward")
    if not value and not has_format:
        raise ByHandError("no reward is left", "rewards")
    if not value:
        return {"rewards": [form], "eval.reward": "strict_format"}
    ours = {"rewards": [correct, form] if has_format else [correct]}
    if has_format and not theirs.get("additive_format_reward"):
        raise RefusedError(
            "without additive_format_reward a right answer counts only in the right format (verifier if format = 1 "
            "else 0); rewards are added here. Set additive_format_reward true, or write the reward as module:function",
            ours,
        )
    return Differs(ours, f"{_VERIFIERS}; the format is strict_format" if has_format else _VERIFIERS)


def _retired(value: Any, theirs: Theirs) -> Any:
    """Return a curriculum that retires a prompt at this pass rate, scaled by the weights of the rewards."""
    if value is None:
        return None
    best = float(theirs.get("verification_reward")) if theirs.get("apply_verifiable_reward") else 0.0
    if theirs.get("apply_r1_style_format_reward") and theirs.get("additive_format_reward"):
        best += float(theirs.get("r1_style_format_reward"))
    return {"easy_from": float(value) * best, "after": 1}


def _refilled(value: Any, theirs: Theirs) -> Any:
    """Return our dynamic sampling; without active_sampling, whether groups of equal rewards are dropped from a step."""
    note = "no limit there; here at most 10 times prompts_per_step are sampled"
    without = {"rollout.drop_zero_variance": bool(theirs.get("filter_zero_std_samples"))}
    return Differs({"rollout.dynamic_sampling": 10}, note) if value else without


def _correction(value: Any, theirs: Theirs) -> Any:
    """Return our correction for rho = learner / engine at the start of the step. Older versions only have a cap."""
    none, truncated = {"loss.correction.name": "none"}, {"loss.correction.name": "truncated"}
    if theirs.get("use_vllm_logprobs"):
        return {"loss.proximal": "engine", **none}
    if theirs.is_given(OLDER_KEYS[0]):
        cap = theirs.get(OLDER_KEYS[0])
        return {**truncated, "loss.correction.args.cap": cap} if cap else none
    if not value:
        return none
    clamp_low, clamp_high, mask_low, mask_high = (
        float(theirs.get(f"rho_{name}_bound")) for name in ("clamp_lower", "clamp_upper", "mask_lower", "mask_upper")
    )
    is_masked, high, mask_high = bool(mask_low or mask_high), clamp_high or 1e9, mask_high or 1e9
    ours: dict[str, Any] = {**truncated, "loss.correction.args.cap": high}
    if is_masked:
        ours = below("loss.correction", {"name": "icepop", "args.low": mask_low, "args.cap": mask_high})
    if clamp_low or (is_masked and high < mask_high):
        raise RefusedError("hpc-grpo truncates a weight from above or masks it, not both: set rho_clamp_lower_bound 0; "
                           "with a mask, rho_clamp_upper_bound 0 too", ours)  # fmt: skip
    if theirs.get("rho_mask_sequence_level") or theirs.get("rho_mask_tv_divergence"):
        raise RefusedError("rho is per token here. For sequences loss.correction has sequence_mask, and geometric, "
                           "which weighs each token by its own ratio", ours)  # fmt: skip
    return ours


def _warmup(value: Any, theirs: Theirs) -> int:
    group = int(theirs.get("num_unique_prompts_rollout")) * int(theirs.get("num_samples_per_prompt_rollout"))
    ratio, updates = float(theirs.get("warmup_ratio")), int(theirs.get("num_mini_batches"))
    return int(ratio * (int(theirs.get("total_episodes")) // group) * updates) or int(value or 0)


def _loss(value: Any, theirs: Theirs) -> dict[str, Any]:
    name = choice({"dapo": "grpo", "cispo": "cispo"}, "loss")(value)
    low = 1.0 if name == "cispo" else float(theirs.get("clip_lower"))
    return {"loss.name": name, "loss.clip_low": low, "loss.clip_high": float(theirs.get("clip_higher"))}


def _kl(value: Any, theirs: Theirs) -> Any:
    if not value:
        return {"loss.kl.coef": 0.0}
    estimator = choice(_KL, "KL estimator")(theirs.get("kl_estimator"))
    ours = {"loss.kl.coef": float(value), "loss.kl.estimator": estimator}
    note = "r * k1 there; here w * r * k3, with w of loss.correction: on-policy, the gradients are equal on average"
    return Differs(ours, note) if estimator == "unbiased" else ours


def _advantage(value: Any, theirs: Theirs) -> dict[str, Any]:
    is_scaled = choice({"standard": True, "centered": False}, "advantage")(value)
    ours = {"name": "group", "normalize_std": is_scaled}
    return below("loss.advantage", ours | ({"args.unbiased_std": False, "args.eps": 1e-8} if is_scaled else {}))


ROWS = (
    Row("exp_name", "run.name", lambda _, theirs: str(theirs.get("run_name", "exp_name")), default="grpo",
        also={"run_name": None}),
    Row("output_dir", "run.root", default="output/", note="the run directory is NAME below it"),
    Row("seed", "run.seed", default=42),
    Row("model_name_or_path", "model.path", lambda value, _: value and str(value).strip()),
    Row("model_revision tokenizer_revision",
        convert=only("main", why="give the folder of that revision as model.path")),
    Row("tokenizer_name_or_path tokenizer_name", note="the tokenizer is that of model.path"),
    Row("trust_remote_code", convert=only(False, why="code that comes with a model is not run")),
    Row("dataset_mixer_list", convert=lambda value, theirs: Differs(_mix(
        "data.train", value, theirs.get("dataset_mixer_list_splits"), theirs), _VERIFIERS),
        default=["ai2-adapt-dev/rlvr_gsm8k_zs", 1.0],
        also={"dataset_mixer_list_splits": ["train"], "ground_truths_key": "ground_truth",
              "sft_messages_key": "messages"}),
    Row("dataset_mixer_eval_list", convert=lambda value, theirs: _mix(
        "data.eval", value, theirs.get("dataset_mixer_eval_list_splits"), theirs),
        default=[], also={"dataset_mixer_eval_list_splits": ["test"]}),
    Row("max_prompt_token_length", convert=lambda value, _: {
        "data.max_prompt_tokens": value, "data.drop_long_prompts": True}, default=256),
    Row("max_token_length", note="an older key: max_prompt_token_length bounds prompts"),
    Row("response_length", "rollout.max_new_tokens", default=256),
    Row("eval_response_length", convert=lambda value, theirs: only(
        theirs.get("response_length"), why="an eval's completions are bounded by "
        "rollout.max_new_tokens")(value, theirs)),
    Row("pack_length", "train.max_tokens_per_microbatch", lambda value, theirs: table.one_sequence(
        value, int(theirs.get("max_prompt_token_length")) + int(theirs.get("response_length"))), default=512),
    Row("num_unique_prompts_rollout", "rollout.prompts_per_step", default=16),
    Row("num_samples_per_prompt_rollout", "rollout.group_size", default=4),
    Row("temperature", "rollout.temperature", default=1.0),
    Row("vllm_top_p", "rollout.top_p", default=1.0),
    Row("stop_strings", "rollout.stop", lambda value, _: table.as_list(value)),
    Row("chat_template_name chat_template", convert=lambda value, theirs: by_hand(
        "copy its text from dataset_transformation.py into a Jinja file", "data.template")(
        str(value).startswith(_TEMPLATES), theirs)),
    Row("system_prompt_override_file", convert=by_hand("copy the file's text", "data.system_prompt")),
    Row("user_prompt_transform", convert=by_hand("write the text around a prompt", "data.template")),
    Row("async_steps", "rollout.max_policy_lag", _lag, default=8),
    Row("async_mode", convert=only(True, why="set rollout.max_policy_lag: 0")),
    Row("inflight_updates", note="engines load weights between two decode steps; running completions continue"),
    Row("active_sampling", convert=_refilled, default=False, also={"filter_zero_std_samples": True}),
    Row("no_resampling_pass_rate no_resample_solve_rate no_resample_positive_rate", "data.curriculum", _retired,
        default=None),
    Row("mask_truncated_completions", "rollout.mask_truncated", default=False),
    Row("non_stop_penalty", convert=only(
        False, why="a truncated completion gets non_stop_penalty_value there, and keeps its reward here: set "
        "rollout.mask_truncated, or write a reward of your own")),
    Row("num_mini_batches", "train.num_minibatches", lambda value, _: table.whole_groups(value, "packed rows"),
        default=1),
    Row("num_epochs", convert=only(1, why="each rollout is trained on once")),
    Row("total_episodes", "train.total_episodes", default=100000),
    Row("learning_rate", "train.lr", default=2e-5),
    Row("lr_scheduler_type", "train.schedule", lambda value, _: table.schedule(value), default="linear"),
    Row("warm_up_steps", "train.warmup_steps", _warmup, default=None, also={"warmup_ratio": 0.0}),
    Row("weight_decay", "train.adamw.weight_decay", default=0.0),
    Row("set_weight_decay_on_bias_and_norm", note="vectors never have weight decay here, like true there"),
    Row("max_grad_norm", "train.max_grad_norm", lambda value, _: Differs(
        1.0, "null clips nothing there; here a norm is needed") if value is None else value, default=1.0),
    Row("adam_betas", "train.adamw.betas", default=[0.9, 0.999]),
    Row("beta", convert=_kl, default=0.05, also={"kl_estimator": 2}),
    Row("load_ref_policy", note="a reference model is loaded if loss.kl.coef is not 0"),
    Row("loss_fn", convert=_loss, default="dapo", also={"clip_lower": 0.2, "clip_higher": 0.272}),
    Row("loss_denominator", "loss.denominator", lambda value, theirs: only(
        "token", why=f"the sum over all tokens is divided by {value} there; here, loss.denominator: N divides by N "
        "times the number of sequences", instead={"loss.denominator": "constant"})(value, theirs) or "tokens",
        default="token"),
    Row("masked_mean_axis", convert=only(why="for axis 1 set loss.denominator: sequences")),
    Row("use_rho_correction truncated_importance_sampling_ratio_cap", convert=_correction, default=True,
        also={"use_vllm_logprobs": False, "rho_clamp_lower_bound": 0.0, "rho_clamp_upper_bound": 2.0,
              "rho_mask_lower_bound": 0.0, "rho_mask_upper_bound": 0.0, "rho_mask_sequence_level": False,
              "rho_mask_tv_divergence": False}),
    Row("advantage_normalization_type", convert=_advantage, default="centered"),
    Row("ref_policy_update_freq", convert=lambda value, theirs: below(
        "loss.kl", {"refresh_steps": int(value), "mixup": float(theirs.get("alpha"))})
        if table.positive(value, theirs) and theirs.get("beta") else {}, default=None, also={"alpha": 0.6}),
    Row("apply_verifiable_reward", convert=_rewards, default=True,
        also={"verification_reward": 10.0, "apply_r1_style_format_reward": False, "r1_style_format_reward": 1.0,
              "additive_format_reward": False}),
    Row("apply_evolving_rubric_reward", convert=only(False, why="rewards do not change during the run")),
    Row("reward_aggregator", note="part of multi-turn rollouts; here the rewards of turns are summed"),
    Row("llm_judge_model llm_judge_* code_api_url code_* max_length_verifier_max_length remap_verifier",
        note="part of verifiers; here each is a reward: rewards.N.name = llm_judge, or code"),
    Row("tools", convert=only([], why="tools are an environment here: write environment.name = tools yourself")),
    Row("tool_* env_* max_steps per_turn_max_tokens only_reward_good_outputs pass_tools_to_chat_template pool_size "
        "mask_tool_use", note="part of tools"),
    Row("vllm_num_engines", convert=_nodes, default=1,
        also={"num_learners_per_node": [1], "vllm_tensor_parallel_size": 1, "num_nodes": 1, "gpus": None,
              "single_gpu_mode": False}),
    Row("sequence_parallel_size cp_degree", convert=table.split_sequences),
    Row("use_peft use_lora use_qlora", convert=only(False, why="set section lora instead: rank, alpha, targets")),
    Row("lora_* cp_strategy non_stop_penalty_value", note="part of LoRA, cp_degree or a refused non_stop_penalty"),
    Row("load_in_4bit load_in_8bit use_fp8_kv_cache", convert=only(False, why="quantised weights are not supported")),
    Row("model_dtype", "model.dtype", table.dtype, default="bfloat16"),
    Row("vllm_gpu_memory_utilization", "engine.vllm.gpu_memory_utilization",
        lambda value, theirs: table.shared_memory(value, theirs) if _shares_gpu(theirs) else value, default=0.9),
    Row("vllm_enforce_eager", "engine.vllm.enforce_eager", default=False),
    Row("vllm_enable_prefix_caching", "engine.vllm.enable_prefix_caching", default=False),
    Row("vllm_sync_backend vllm_attention_backend", note="weights go through shared memory and Gloo"),
    Row("deepspeed_stage", "train.zero_stage", lambda value, _: value or Differs(1, "here at least ZeRO 1"), default=0),
    Row("deepspeed_offload_optimizer", "train.offload_optimizer", lambda value, _: "cpu" if value else "none",
        default=False),
    Row("gradient_checkpointing", "train.gradient_checkpointing", lambda *_: True, default=False),
    Row("local_eval_every", "eval.every", lambda value, theirs: table.positive(
        value, theirs) if theirs.get("dataset_mixer_eval_list") else None, default=100),
    Row("eval_pass_at_k", "eval.num_samples", default=1),
    Row("eval_temperature", "eval.temperature", lambda value, theirs: theirs.get("temperature")
        if value is None else value, default=None),
    Row("eval_top_p", "eval.top_p"),
    Row("save_freq", "checkpoint.export_every", table.positive, default=200),
    Row("checkpoint_state_freq", "checkpoint.every", lambda value, theirs: Differs(table.positive(value, theirs),
        "" if theirs.get("checkpoint_state_dir") else "open-instruct saves nothing without checkpoint_state_dir"),
        default=200, also={"checkpoint_state_dir": None}),
    Row("keep_last_n_checkpoints", "checkpoint.keep_exports", table.positive, default=3),
    Row("with_tracking", "metrics.wandb.mode", lambda value, _: "auto" if value else "disabled", default=False),
    Row("wandb_project_name wandb_project", "metrics.wandb.project", default="open_instruct_internal"),
    Row("wandb_entity", "metrics.wandb.entity"),
    Row("deepspeed_zpg deepspeed_offload_param deepspeed_checkpoint_load_universal gather_whole_model fsdp_* "
        "fused_optimizer compile_model activation_* attn_implementation dtype use_cache bnb_4bit_quant_type "
        "use_bnb_nested_quant", note="only ZeRO's stage and offload can be chosen: train.zero_stage"),
    Row("per_device_train_batch_size gradient_accumulation_steps max_seq_length max_train_steps world_size "
        "num_training_steps max_possible_score",
        note="a microbatch is a budget of tokens: train.max_tokens_per_microbatch"),
    Row("eval_on_step_0", note="if there are evals, one runs before training too"),
    Row("push_to_hub hf_*", note="exports stay in the run directory"),
    Row("save_traces rollouts_save_path record_entropy logging_steps report_to wandb_group_name",
        note="rollouts and entropy are always written: rollout.logged_fraction"),
    Row("checkpointing_steps ephemeral_save_interval resume_from_checkpoint",
        note="part of other trainers; the same command resumes a run"),
    Row("task_name cluster workspace priority pure_docker_mode image preemptible budget env description max_retries "
        "oe_eval_* try_launch_beaker_eval_jobs* try_auto_save_to_beaker eval_priority eval_workspace gs_* "
        "no_auto_dataset_cache auto_output_dir_path auto_checkpoint_state_dir dataset_local_cache_dir "
        "dataset_skip_cache shuffle_eval_dataset dataset_config_* timeout verbose active_fill_completions add_bos "
        "add_seed_and_date_to_exp_name dataset_cache_mode dataset_transform_fn backend_timeout tokenizer_* "
        "get_tokenizer_fn use_fast use_slow_tokenizer cache_dataset_only cache_evolving_rubric_data_dir "
        "max_active_rubrics data_loader_seed enable_queue_dashboard queue_dashboard_port send_slack_alerts",
        note="part of AI2's cluster, evaluation service or hub"),
)  # fmt: skip
