"""Keys and values of example files that other projects ship, by repository, path and commit. Facts, in our own layout.

Left out are comments, `${…}` that repeat a value which stands here, and long texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Example:
    """One file: `keys` by dotted name, or the `words` of the command that a script comes to."""

    repository: str
    path: str
    commit: str
    keys: dict[str, Any]


def _areal(path: str, commit: str, **sections: Any) -> Example:
    return Example("inclusionAI/AReaL", path, commit, sections)


_ADAM = {
    "type": "adam", "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "lr_scheduler_type": "constant",
    "gradient_clipping": 1.0, "warmup_steps_proportion": 0.001,
}  # fmt: skip
_ACTOR = {
    "init_from_scratch": False, "disable_dropout": True, "dtype": "bfloat16", "group_size": "${gconfig.n_samples}",
    "eps_clip": 0.4, "temperature": "${gconfig.temperature}", "reward_scaling": 10.0, "reward_bias": -0.5,
    "kl_ctl": 0.0, "recompute_logprob": True, "use_decoupled_loss": True, "behav_imp_weight_cap": 5.0,
}  # fmt: skip
_REF = {
    "path": "${actor.path}", "init_from_scratch": False, "disable_dropout": True, "dtype": "${actor.dtype}",
    "mb_spec": {"max_tokens_per_mb": 10240}, "optimizer": None, "backend": "fsdp",
}  # fmt: skip
_SAVER = {"fileroot": "${cluster.fileroot}", "freq_epochs": 1, "freq_steps": None, "freq_secs": None}
_RECOVER = {"mode": "disabled", "freq_epochs": 1, "freq_steps": None, "freq_secs": 3600}
_CLUSTER = {"fileroot": "/tmp/areal/experiments", "n_gpus_per_node": 8, "name_resolve": {"type": "nfs"}}
_GCONFIG = {"min_new_tokens": 0, "greedy": False, "temperature": 1.0}

AREAL = {
    "boba": _areal(
        "examples/math/boba_grpo_vllm.yaml", "2158804f16b94c1d6239cf431022823ed6fef622",
        experiment_name="boba_ppo_vllm", trial_name="trial0", seed=1, total_train_epochs=10, total_train_steps=None,
        cluster={**_CLUSTER, "n_nodes": 2, "cluster_name": "na132"}, tokenizer_path="${actor.path}",
        allocation_mode="vllm.d4p1t2+d8p1t1", async_training=True,
        rollout={"max_concurrent_rollouts": 400, "queue_size": None, "max_head_offpolicyness": 4,
                 "consumer_batch_size": "${train_dataset.batch_size}", "enable_rollout_tracing": True},
        gconfig={**_GCONFIG, "n_samples": 16, "max_new_tokens": 30720},
        actor={**_ACTOR, "path": "Qwen/Qwen2.5-1.5B-Instruct", "gradient_checkpointing": True, "backend": "fsdp",
               "mb_spec": {"max_tokens_per_mb": 32768}, "ppo_n_minibatches": 4,
               "optimizer": {**_ADAM, "lr": 1e-5, "weight_decay": 0.01}},
        ref=_REF, vllm={"model": "${actor.path}", "seed": "${seed}", "skip_tokenizer_init": False,
                        "dtype": "${actor.dtype}", "max_model_len": 32768, "gpu_memory_utilization": 0.9},
        train_dataset={"path": "inclusionAI/AReaL-boba-Data", "batch_size": 512, "shuffle": True, "pin_memory": True,
                       "type": "rl"},
        saver=_SAVER, recover={**_RECOVER, "retries": 0},
        evaluator={"freq_epochs": None, "freq_steps": None, "freq_secs": None},
        stats_logger={"wandb": {"mode": "disabled"}}, launcher={"trainer_cpus_per_gpu": 15},
    ),
    "gsm8k": _areal(
        "examples/math/gsm8k_grpo.yaml", "8a15475d09c8c9ddef08851614861f01b6e0eaef",
        experiment_name="gsm8k-grpo", trial_name="trial0", seed=1, total_train_epochs=10,
        cluster={**_CLUSTER, "n_nodes": 1}, tokenizer_path="${actor.path}",
        allocation_mode="sglang.d4p1t1+d4p1t1", async_training=True,
        rollout={"max_concurrent_rollouts": 256, "queue_size": None, "max_head_offpolicyness": 2,
                 "consumer_batch_size": "${train_dataset.batch_size}", "enable_rollout_tracing": False},
        gconfig={**_GCONFIG, "n_samples": 4, "max_new_tokens": 1024},
        actor={**_ACTOR, "path": "Qwen/Qwen2.5-1.5B-Instruct", "gradient_checkpointing": False, "backend": "fsdp",
               "mb_spec": {"max_tokens_per_mb": 10240}, "ppo_n_minibatches": 1, "group_adv_norm": False,
               "dynamic_sampling": False, "max_new_tokens": "${gconfig.max_new_tokens}",
               "optimizer": {**_ADAM, "lr": 1.70e-5, "weight_decay": 0.017}},
        ref=_REF, sglang={"model_path": "${actor.path}", "context_length": 32768, "mem_fraction_static": 0.8},
        train_dataset={"path": "openai/gsm8k", "batch_size": 256, "shuffle": True, "max_length": 1024, "type": "rl"},
        valid_dataset={"path": "openai/gsm8k", "batch_size": 256, "shuffle": True, "type": "rl"},
        saver=_SAVER, recover=_RECOVER, evaluator=_SAVER, stats_logger={"wandb": {"mode": "disabled"}},
        launcher={"inference_server_cpus_per_gpu": 4},
    ),
    "lora": _areal(
        "examples/lora/gsm8k_grpo_lora_vllm.yaml", "4b91a21cf1ab36e17dd6528852b32536a3fa8582",
        experiment_name="gsm8k-grpo", trial_name="trial0", seed=1, enable_offload=False, total_train_epochs=10,
        cluster={**_CLUSTER, "n_nodes": 1}, tokenizer_path="${actor.path}", allocation_mode="vllm:d4p1t1+d4p1t1",
        scheduler={"type": None},
        rollout={"max_concurrent_rollouts": 256, "max_head_offpolicyness": 2, "use_lora": True},
        gconfig={**_GCONFIG, "n_samples": 4, "max_new_tokens": 1024, "lora_name": "lora-gsm8k"},
        actor={**_ACTOR, "path": "./model/Qwen3-0.6B", "gradient_checkpointing": True, "ppo_n_minibatches": 1,
               "mb_spec": {"max_tokens_per_mb": 10240}, "dynamic_sampling": False, "weight_update_mode": "xccl",
               "optimizer": {**_ADAM, "lr": 1.70e-4, "weight_decay": 0.017},
               "reward_norm": {"mean_level": "group", "std_level": "group", "group_size": "${gconfig.n_samples}"},
               "adv_norm": {"mean_level": "batch", "std_level": "batch"},
               "use_lora": "${rollout.use_lora}", "peft_type": "lora", "lora_rank": 16, "lora_alpha": 16,
               "target_modules": ["all-linear"]},
        ref={**_REF, "scheduling_strategy": {"type": "colocation", "target": "actor"}},
        vllm={"model": "${actor.path}", "dtype": "${actor.dtype}", "max_model_len": 32768, "enforce_eager": True,
              "gpu_memory_utilization": 0.9, "enable_lora": "${rollout.use_lora}"},
        train_dataset={"path": "openai/gsm8k", "batch_size": 256, "shuffle": True, "max_length": 1024, "type": "rl"},
        valid_dataset={"path": "openai/gsm8k", "batch_size": 256, "type": "rl"},
        saver=_SAVER, recover=_RECOVER, evaluator=_SAVER, stats_logger={"wandb": {"mode": "disabled"}},
        perf_tracer={"enabled": False}, launcher={"trainer_mem_per_gpu": 32768},
    ),
    "0.3": _areal(
        "training/configs/async-ppo.yaml", "7dc6daa6cc2b47ecacbf8bc52262138147df2b0b",
        experiment_name="async-ppo", trial_name="my-trial", seed=1, mode="ray", recover_mode="auto",
        recover_retries=10, recover_after=10, wandb={"mode": "disabled", "entity": None, "project": None},
        tensorboard={"path": None},
        exp_ctrl={"total_train_epochs": 5, "save_freq_epochs": 1, "save_freq_steps": None, "save_freq_secs": None,
                  "ckpt_freq_epochs": None, "ckpt_freq_steps": None, "ckpt_freq_secs": 600, "eval_freq_epochs": None,
                  "eval_freq_steps": None, "eval_freq_secs": None, "benchmark_steps": None},
        max_head_offpolicyness=4, n_rollout_workers=None, max_concurrent_rollouts=None, flush_request_timeout=300,
        cpus_per_generation_server=4, allocation_mode="sglang.d4p1m1+d2p2m1", n_nodes=1, n_gpus_per_node=8,
        cluster={"fileroot": "/storage/ray/experiments", "n_nodes": 32, "n_gpus_per_node": 8},
        actor={"type": {"_class": "qwen3"}, "path": "/storage/openpsi/models/Qwen3-1.7B/", "init_from_scratch": False,
               "gradient_checkpointing": True, "bf16": False, "sglang": {"context_length": 32768, "dtype": "float16"},
               "megatron": {"ddp": {"use_distributed_optimizer": True}},
               "optimizer": {"type": "adam", "lr": 2e-5, "weight_decay": 0.05, "beta1": 0.9, "beta2": 0.95,
                             "eps": 1e-5, "lr_scheduler_type": "constant", "warmup_steps_proportion": 0.001,
                             "gradient_clipping": 1.0, "min_lr_ratio": 0.0}},
        ref={"type": {"_class": "qwen3"}, "path": "/storage/openpsi/models/Qwen3-1.7B/", "bf16": False},
        actor_train={"mb_spec": {"max_tokens_per_mb": 30720}}, ref_inf={"mb_spec": {"max_tokens_per_mb": 30720}},
        shuffle_dataset=True, dataset={"path": "/storage/datasets/boba_106k_0319.jsonl", "max_prompt_len": 1024,
                                       "train_bs_n_seqs": 512},
        group_size=16, mask_too_long=False, group_adv_norm=False, rw_type="sparse", success_rate_ub=1.0,
        success_rate_lb=0.0,
        ppo={"gen": {"n": 1, "max_new_tokens": 27648, "min_new_tokens": 0, "greedy": False, "top_p": 1.0,
                     "top_k": 1000000, "temperature": 1.0},
             "ppo_n_minibatches": 4, "eps_clip": 0.2, "c_clip": None, "value_eps_clip": 0.2,
             "early_stop_imp_ratio": 5.0,
             "actor_sample_reuse": 1, "max_reward_clip": 20.0, "reward_output_scaling": 5.0, "reward_output_bias": 0.0,
             "fuse_rew_ref": True, "discount": 1.0, "gae_lambda": 1.0, "adv_norm": True, "kl_ctl": 0.0,
             "use_adaptive_kl_ctl": False, "disable_value": True, "recompute_logprob": True, "use_decoupled_loss": True,
             "behav_imp_weight_cap": None},
        cpus_per_master_worker=4, mem_per_master_worker=20000,
    ),
}  # fmt: skip

_VERL = {
    "algorithm.adv_estimator": "grpo", "data.train_batch_size": 1024, "data.max_response_length": 1024,
    "data.filter_overlong_prompts": True, "data.truncation": "error",
    "actor_rollout_ref.model.path": "Qwen/Qwen2-7B-Instruct", "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.model.use_remove_padding": True, "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl", "actor_rollout_ref.actor.entropy_coeff": 0,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.actor.fsdp_config.param_offload": False,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": False,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2, "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6, "actor_rollout_ref.rollout.n": 5,
    "actor_rollout_ref.ref.fsdp_config.param_offload": True, "algorithm.use_kl_in_reward": False,
    "trainer.critic_warmup": 0, "trainer.logger": ["console", "wandb"], "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1, "trainer.save_freq": 20, "trainer.test_freq": 5, "trainer.total_epochs": 15,
}  # fmt: skip
_GSM8K = {"data.train_files": "/home/me/data/gsm8k/train.parquet", "data.val_files": "/home/me/data/gsm8k/test.parquet"}
_VERL_COMMIT = "3f388066192c138aa19338f49accbe8bb9f72f33"

VERL = {
    "qwen2-7b": Example("volcengine/verl", "examples/grpo_trainer/run_qwen2-7b.sh", _VERL_COMMIT, {
        **_VERL, **_GSM8K, "data.max_prompt_length": 512, "trainer.experiment_name": "qwen2_7b_function_rm",
        "trainer.project_name": "verl_grpo_example_gsm8k",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 40,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 40,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 40,
    }),
    "math": Example(
        "volcengine/verl", "examples/grpo_trainer/run_qwen2-7b_math.sh", "e2205a95bff75279ec1519daab720f499dbf0cc4", {
        **_VERL, "data.train_files": ["/home/me/data/gsm8k/train.parquet", "/home/me/data/math/train.parquet"],
        "data.val_files": ["/home/me/data/gsm8k/test.parquet", "/home/me/data/math/test.parquet"],
        "data.max_prompt_length": 1024, "trainer.experiment_name": "qwen2_7b_function_rm",
        "trainer.project_name": "verl_grpo_example_gsm8k_math", "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 16,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 16,
    }),
    "seq_balance": Example("volcengine/verl", "examples/grpo_trainer/run_qwen2-7b_seq_balance.sh", _VERL_COMMIT, {
        **_VERL, **_GSM8K, "data.max_prompt_length": 512, "data.return_raw_chat": True,
        "trainer.experiment_name": "qwen2_7b_function_rm_kl1e-3", "trainer.project_name": "verl_grpo_example_gsm8k",
        "actor_rollout_ref.actor.use_dynamic_bsz": True, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 24000,
        "actor_rollout_ref.rollout.name": "sglang", "actor_rollout_ref.rollout.mode": "async",
        "actor_rollout_ref.rollout.multi_turn.format": "hermes", "trainer.val_before_train": False,
    }),
}  # fmt: skip

_INSTRUCT = {
    "beta": 0.0, "num_mini_batches": 1, "learning_rate": 1e-6, "per_device_train_batch_size": 1,
    "dataset_mixer_list_splits": "train", "temperature": 1.0, "deepspeed_stage": 3, "vllm_tensor_parallel_size": 1,
    "lr_scheduler_type": "constant", "apply_verifiable_reward": True, "seed": 1, "gradient_checkpointing": True,
    "with_tracking": True,
}  # fmt: skip

OPEN_INSTRUCT = {
    "olmo3": Example(
        "allenai/open-instruct", "scripts/train/olmo3/7b_rlzero_math.sh", "81d488e6df1754dc7b9ad11db8618c15da4d92ff", {
        **_INSTRUCT, "num_nodes": 8, "gpus": 8, "exp_name": "olmo3_7b_rlzero_math", "async_steps": 4,
        "inflight_updates": True, "truncated_importance_sampling_ratio_cap": 2.0,
        "advantage_normalization_type": "centered", "active_fill_completions": True, "no_resample_solve_rate": 0.9,
        "num_samples_per_prompt_rollout": 16, "num_unique_prompts_rollout": 16, "kl_estimator": 2,
        "dataset_mixer_list": ["allenai/Dolci-RLZero-Math-7B", 1.0],
        "dataset_mixer_eval_list": ["allenai/aime2024-25-rlvr", 1.0, "allenai/aime2024-25-rlvr", 1.0],
        "dataset_mixer_eval_list_splits": ["test_2024", "test_2024", "test_2025", "test_2025"],
        "max_prompt_token_length": 2048, "response_length": 12000, "pack_length": 32768,
        "model_name_or_path": "allenai/Olmo-3-1025-7B", "chat_template_name": "olmo_thinker_rlzero",
        "non_stop_penalty": False, "total_episodes": 512000, "num_learners_per_node": 8, "vllm_num_engines": 64,
        "local_eval_every": 100, "save_freq": 100, "checkpoint_state_freq": 100, "vllm_enable_prefix_caching": True,
        "clip_higher": 0.272, "mask_truncated_completions": True, "oe_eval_max_length": 32768,
        "try_launch_beaker_eval_jobs_on_weka": True, "eval_priority": "high", "oe_eval_gpu_multiplier": 4,
        "output_dir": "/output/olmo3-7b-rlzero-math/checkpoints",
    }),
    "qwen7b": Example(
        "allenai/open-instruct", "scripts/train/qwen/grpo_fast_7b.sh", "81d488e6df1754dc7b9ad11db8618c15da4d92ff", {
        **_INSTRUCT, "num_nodes": 2, "gpus": 8, "exp_name": "qwen2.5_7b_grpo_fast_zero",
        "num_unique_prompts_rollout": 48, "num_samples_per_prompt_rollout": 16, "kl_estimator": 2,
        "learning_rate": 5e-7, "dataset_mixer_list": ["ai2-adapt-dev/math_ground_truth_zs", 1.0],
        "dataset_mixer_eval_list": ["ai2-adapt-dev/math_ground_truth_zs", 16],
        "dataset_mixer_eval_list_splits": "train",
        "max_token_length": 2048, "max_prompt_token_length": 2048, "response_length": 4096, "pack_length": 6144,
        "model_name_or_path": "Qwen/Qwen2.5-7B", "stop_strings": "</answer>", "apply_r1_style_format_reward": True,
        "non_stop_penalty": True, "non_stop_penalty_value": 0.0, "chat_template_name": "r1_simple_chat_postpend_think",
        "oe_eval_max_length": 8192, "total_episodes": 5000000, "num_learners_per_node": 4, "num_epochs": 1,
        "vllm_num_engines": 12, "lr_scheduler_type": "linear", "local_eval_every": 30, "save_freq": 40,
        "try_launch_beaker_eval_jobs_on_weka": True,
    }),
    "gsm8k": Example(
        "allenai/open-instruct", "scripts/train/qwen/qwen2.5_0.5b_gsm8k.sh",
        "302725219d0b877ea402e27fa7b4e19bdb815a8d", {
        **_INSTRUCT, "num_nodes": 1, "gpus": 1, "output_dir": "results", "run_name": "test",
        "exp_name": "qwen25_05b_it_gsm8k", "async_steps": 4, "active_sampling": True, "inflight_updates": True,
        "truncated_importance_sampling_ratio_cap": 2.0, "advantage_normalization_type": "centered",
        "num_samples_per_prompt_rollout": 16, "num_unique_prompts_rollout": 32,
        "dataset_mixer_list": ["ai2-adapt-dev/rlvr_gsm8k_zs", 1.0],
        "dataset_mixer_eval_list": ["mnoukhov/gsm8k-platinum-openinstruct", 1.0],
        "dataset_mixer_eval_list_splits": "test", "max_prompt_token_length": 512, "response_length": 2048,
        "pack_length": 4096, "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
        "user_prompt_transform": "{prompt}\n\nPlease reason step by step.", "non_stop_penalty": False,
        "total_episodes": 256, "deepspeed_stage": 2, "local_eval_every": 1, "save_freq": 200,
        "vllm_enable_prefix_caching": True, "num_learners_per_node": 1, "clip_higher": 0.28,
        "mask_truncated_completions": False, "load_ref_policy": False, "eval_on_step_0": True, "eval_pass_at_k": 4,
        "push_to_hub": False,
    }),
}  # fmt: skip

_R1 = {
    "model_revision": "main", "torch_dtype": "bfloat16", "attn_implementation": "flash_attention_2", "bf16": True,
    "use_vllm": True, "gradient_checkpointing": True, "gradient_checkpointing_kwargs.use_reentrant": False,
    "hub_strategy": "every_save", "log_completions": True, "log_level": "info", "logging_first_step": True,
    "logging_strategy": "steps", "max_steps": -1, "num_train_epochs": 1, "overwrite_output_dir": True,
    "push_to_hub": True, "report_to": ["wandb"], "seed": 42, "warmup_ratio": 0.1, "per_device_train_batch_size": 16,
}  # fmt: skip
_R1_DEMO = {
    **_R1, "dataset_name": "open-r1/OpenR1-Math-220k", "dataset_configs": ["default"], "system_prompt": "You are …",
    "vllm_device": "auto", "vllm_gpu_memory_utilization": 0.7, "do_eval": False, "gradient_accumulation_steps": 4,
    "logging_steps": 1, "max_prompt_length": 512, "num_generations": 16, "per_device_eval_batch_size": 16,
    "reward_funcs": ["accuracy", "format"], "save_strategy": "epoch", "save_total_limit": 1,
}  # fmt: skip

TRL = {
    "qwen-1.5b": Example(
        "huggingface/open-r1", "recipes/Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml",
        "bd581c7e73bbd0b63b6605fc1ed4b51d231fa597", {
        **_R1_DEMO, "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct", "learning_rate": 2e-5,
        "lr_scheduler_type": "cosine", "max_completion_length": 1024, "output_dir": "data/Qwen2.5-1.5B-Open-R1-GRPO",
        "hub_model_id": "Qwen2.5-1.5B-Open-R1-GRPO",
    }),
    "distill-1.5b": Example(
        "huggingface/open-r1", "recipes/DeepSeek-R1-Distill-Qwen-1.5B/grpo/config_demo.yaml",
        "bd581c7e73bbd0b63b6605fc1ed4b51d231fa597", {
        **_R1_DEMO, "model_name_or_path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "learning_rate": 1e-6,
        "chat_template": "{% if …", "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs.min_lr_rate": 0.1,
        "max_completion_length": 2048, "output_dir": "data/DeepSeek-R1-Distill-Qwen-1.5B-GRPO", "temperature": 0.7,
    }),
    "simple-rl": Example(
        "huggingface/open-r1", "recipes/Qwen2.5-Math-7B/grpo/config_simple_rl.yaml",
        "c9dbc31db7cf904c06af69ca9c445cf73cf48011", {
        **_R1, "dataset_name": "DigitalLearningGmbH/MATH-lighteval", "dataset_config": "default",
        "system_prompt": "You are …", "model_name_or_path": "aidando73/Qwen-2.5-7B-Simple-RL-v2",
        "output_dir": "data/Qwen-2.5-7B-Simple-RL-v4", "wandb_project": "open-r1-math-rl", "learning_rate": 1.5e-6,
        "reward_weights": [1.0, 0.5], "reward_funcs": ["accuracy", "format"], "vllm_device": "auto",
        "vllm_gpu_memory_utilization": 0.7, "do_eval": True, "eval_strategy": "steps", "eval_steps": 100,
        "gradient_accumulation_steps": 8, "logging_steps": 5, "lr_scheduler_type": "cosine", "max_prompt_length": 650,
        "max_completion_length": 1024, "num_generations": 7, "per_device_eval_batch_size": 16,
        "save_strategy": "epoch", "wandb_description": "Reduced learning rate",
    }),
    "zero-7b": Example(
        "huggingface/open-r1", "recipes/OpenR1-Zero-7B-Math/grpo/config_v08.00.yaml",
        "e9a6afc967f963e24117daf13b67f7ca7d803c1c", {
        **_R1, "model_name_or_path": "Qwen/Qwen2.5-7B", "chat_template": "{%- if …", "dataset_config": "all",
        "dataset_name": "open-r1/DAPO-Math-17k-Processed", "callbacks": ["push_to_hub_revision"],
        "benchmarks": ["math_500", "aime24"], "beta": 0.0, "do_eval": False, "eval_strategy": "no",
        "gradient_accumulation_steps": 16, "generation_batch_size": 512, "learning_rate": 1e-6,
        "lr_scheduler_type": "constant_with_warmup", "mask_truncated_completions": True, "max_grad_norm": 0.2,
        "max_prompt_length": 1024, "max_completion_length": 8192, "num_generations": 16, "num_iterations": 1,
        "output_dir": "data/R1-Zero-Qwen-7B-Math-v08.00", "per_device_train_batch_size": 4, "epsilon": 0.2,
        "reward_funcs": ["accuracy", "format", "soft_format"], "reward_weights": [1.0, 0.25, 0.25],
        "save_strategy": "steps", "save_steps": 0.1, "save_total_limit": 1, "sync_ref_model": False, "temperature": 1.0,
    }),
}  # fmt: skip
