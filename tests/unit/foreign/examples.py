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

_1_0_4 = "4aef98d8d818af55b43621aaadba047ae10f4e77"
_ENGINE = {"experiment_name": "${experiment_name}", "trial_name": "${trial_name}", "init_from_scratch": False,
           "disable_dropout": True, "scheduling_spec": "${actor.scheduling_spec}"}  # fmt: skip
_UTILITY = {"experiment_name": "${experiment_name}", "trial_name": "${trial_name}", "fileroot": "${cluster.fileroot}"}
_EVERY_EPOCH = {**_UTILITY, "freq_epochs": 1, "freq_steps": None, "freq_secs": None}
_NORMS = {"reward_norm": {"mean_level": "group", "std_level": "group", "group_size": "${gconfig.n_samples}"},
          "adv_norm": {"mean_level": "batch", "std_level": "batch"}}  # fmt: skip


def _areal_1_0_4(path: str, backends: tuple[str, str], rollout: dict[str, Any], gconfig: dict[str, Any],
                 actor: dict[str, Any], train_dataset: dict[str, Any], **sections: Any) -> Example:  # fmt: skip
    """One of the examples of AReaL 1.0.4, which have most of their keys in common."""
    return _areal(
        path, _1_0_4, trial_name="trial0", seed=1, enable_offload=False, total_train_epochs=10,
        tokenizer_path="${actor.path}", scheduler={"type": None},
        cluster={"n_nodes": 1, "n_gpus_per_node": 8, "fileroot": "/tmp/areal/experiments", "name_resolve": {
            "type": "nfs", "nfs_record_root": "/tmp/areal/name_resolve"}},
        rollout={"backend": backends[0], "experiment_name": "${experiment_name}", "trial_name": "${trial_name}",
                 "queue_size": None, "consumer_batch_size": "${train_dataset.batch_size}", "dump_to_file": True,
                 "fileroot": "${cluster.fileroot}", "tokenizer_path": "${tokenizer_path}", **rollout},
        gconfig={**_GCONFIG, **gconfig},
        actor={**_ENGINE, "scheduling_spec": [{"task_type": "worker", "gpu": 1}], "backend": backends[1],
               "gradient_checkpointing": True, "dtype": "bfloat16", "eps_clip": 0.4, "kl_ctl": 0.0,
               "temperature": "${gconfig.temperature}", "reward_scaling": 10.0, "reward_bias": -0.5,
               "rejection_sampling": {"metric": "ratio", "upper": 5.0}, "max_new_tokens": "${gconfig.max_new_tokens}",
               **_NORMS, **actor},
        ref={**_ENGINE, "backend": "${actor.backend}", "path": "${actor.path}", "dtype": "${actor.dtype}",
             "mb_spec": {"max_tokens_per_mb": 10240}, "optimizer": None,
             "scheduling_strategy": {"type": "colocation", "target": "actor"}},
        vllm={"model": "${actor.path}", "seed": "${seed}", "skip_tokenizer_init": False, "dtype": "${actor.dtype}",
              "max_model_len": 32768, "gpu_memory_utilization": 0.9},
        train_dataset={"pin_memory": True, "type": "rl", **train_dataset},
        saver=_EVERY_EPOCH, recover={**_EVERY_EPOCH, "mode": "disabled", "freq_secs": 3600},
        stats_logger={**_UTILITY, "wandb": {"mode": "disabled"}},
        perf_tracer={**_UTILITY, "enabled": False, "session_tracer": {"enabled": False}}, **sections,
    )  # fmt: skip


_SMALL_ACTOR = {"path": "Qwen/Qwen2.5-1.5B-Instruct", "mb_spec": {"max_tokens_per_mb": 10240}, "ppo_n_minibatches": 1,
                "optimizer": {**_ADAM, "lr": 1.70e-5, "weight_decay": 0.017}}  # fmt: skip
_DECOUPLED = {"recompute_logprob": True, "use_decoupled_loss": True}
_GSM8K_1_0_4: dict[str, Any] = {
    "backends": ("sglang:d4p1t1", "fsdp:d4p1t1"),
    "rollout": {"max_concurrent_rollouts": 256, "max_head_offpolicyness": 2, "enable_rollout_tracing": False},
    "gconfig": {"n_samples": 4, "max_new_tokens": 1024},
    "train_dataset": {"path": "openai/gsm8k", "batch_size": 256, "shuffle": True, "max_length": 1024, "num_workers": 4},
    "valid_dataset": {"path": "openai/gsm8k", "batch_size": 256, "type": "rl", "pin_memory": True, "num_workers": 4},
    "evaluator": _EVERY_EPOCH,
}

AREAL = {
    "boba-1.0.4": _areal_1_0_4(
        "examples/math/boba_grpo.yaml", ("vllm:d4", "fsdp:d4"), experiment_name="boba_grpo",
        rollout={"max_concurrent_rollouts": 64, "max_head_offpolicyness": 4, "enable_rollout_tracing": True},
        gconfig={"n_samples": 16, "max_new_tokens": 8192},
        actor={**_DECOUPLED, "path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "ppo_n_minibatches": 4,
               "mb_spec": {"max_tokens_per_mb": 16384}, "optimizer": {**_ADAM, "lr": 1e-5, "weight_decay": 0.01}},
        train_dataset={"path": "inclusionAI/AReaL-boba-Data", "batch_size": 32},
        evaluator={**_UTILITY, "freq_epochs": None, "freq_steps": None, "freq_secs": None},
    ),
    "gsm8k-1.0.4": _areal_1_0_4("examples/math/gsm8k_grpo.yaml", experiment_name="gsm8k-grpo",
                                actor={**_SMALL_ACTOR, **_DECOUPLED}, **_GSM8K_1_0_4),
    "gspo-1.0.4": _areal_1_0_4(
        "examples/math/gsm8k_gspo.yaml", experiment_name="gsm8k-gspo",
        actor={**_SMALL_ACTOR, **_DECOUPLED, "importance_sampling_level": "sequence"}, **_GSM8K_1_0_4),
    "sapo-1.0.4": _areal_1_0_4(
        "examples/math/gsm8k_sapo.yaml", experiment_name="gsm8k-sapo", **_GSM8K_1_0_4,
        actor={**_SMALL_ACTOR, "recompute_logprob": False, "use_decoupled_loss": False, "use_sapo_loss": True,
               "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05}),
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

_VERL_0_8 = "b178a3cd56f58b2d502255daba591e92833930a7"
VERL |= {
    "cispo": Example(
        "volcengine/verl", "examples/cispo_trainer/run_cispo_qwen2_5_0_5b_gsm8k.sh", _VERL_0_8, {
        **_VERL, **_GSM8K, "actor_rollout_ref.actor.policy_loss.loss_mode": "cispo",
        "actor_rollout_ref.actor.clip_ratio_low": 10, "actor_rollout_ref.actor.clip_ratio_high": 0.2,
        "data.train_batch_size": 256, "data.max_prompt_length": 1024,
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B-Instruct",
        "actor_rollout_ref.model.torch_dtype": "bfloat16", "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 16,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 16,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.8, "trainer.project_name": "verl_cispo_example_gsm8k",
        "trainer.experiment_name": "qwen2_5_0_5b_cispo", "trainer.n_gpus_per_node": 1, "trainer.save_freq": 5,
        "trainer.total_epochs": 3,
    }),
    "rloo": Example("volcengine/verl", "examples/rloo_trainer/run_qwen2-7b.sh", _VERL_0_8, {
        **{key: value for key, value in {**_VERL, **_GSM8K}.items() if "kl_loss_" not in key and "entropy" not in key},
        "algorithm.adv_estimator": "rloo", "data.max_prompt_length": 512,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 80, "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 160,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 160, "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": 0.001,
        "trainer.project_name": "verl_rloo_example_gsm8k", "trainer.experiment_name": "qwen2_7b_function_rm",
        "trainer.save_freq": -1,
    }),
    "gspo": Example("volcengine/verl", "examples/gspo_trainer/test_gspo_3b_math.sh", _VERL_0_8, {
        "algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
        "data.train_files": "/data/gsm8k/train.parquet", "data.val_files": "/data/gsm8k/test.parquet",
        "data.shuffle": True, "data.prompt_key": "prompt", "data.truncation": "error",
        "data.filter_overlong_prompts": True, "data.return_raw_chat": True, "data.train_batch_size": 512,
        "data.max_prompt_length": 2048, "data.max_response_length": 8192, "actor_rollout_ref.rollout.n": 16,
        "algorithm.use_kl_in_reward": False, "algorithm.kl_ctrl.kl_coef": 0.0,
        "actor_rollout_ref.actor.use_kl_loss": False, "actor_rollout_ref.actor.kl_loss_coef": 0.0,
        "actor_rollout_ref.actor.clip_ratio_low": 0.0003, "actor_rollout_ref.actor.clip_ratio_high": 0.0004,
        "actor_rollout_ref.model.use_remove_padding": True, "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 20480,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 30720,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 30720, "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.mode": "async", "actor_rollout_ref.model.path": "Qwen/Qwen2.5-3B-Instruct",
        "actor_rollout_ref.model.enable_gradient_checkpointing": True, "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.05,
        "actor_rollout_ref.actor.optim.weight_decay": 0.1, "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean", "trainer.total_training_steps": 500,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.actor.fsdp_config.param_offload": True,
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True, "actor_rollout_ref.actor.entropy_coeff": 0,
        "actor_rollout_ref.actor.grad_clip": 1.0, "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.8,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.enable_chunked_prefill": True,
        "actor_rollout_ref.rollout.max_num_batched_tokens": 10240, "actor_rollout_ref.rollout.temperature": 1.0,
        "actor_rollout_ref.rollout.top_p": 1.0, "actor_rollout_ref.rollout.top_k": -1,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0, "actor_rollout_ref.rollout.val_kwargs.top_p": 0.7,
        "actor_rollout_ref.rollout.val_kwargs.top_k": -1, "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
        "actor_rollout_ref.rollout.val_kwargs.n": 1, "actor_rollout_ref.ref.fsdp_config.param_offload": True,
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size": 1,
        "actor_rollout_ref.actor.entropy_checkpointing": True, "reward_model.reward_manager": "dapo",
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable": False,
        "reward_model.reward_kwargs.overlong_buffer_cfg.len": 4096,
        "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": 1.0,
        "reward_model.reward_kwargs.overlong_buffer_cfg.log": False,
        "reward_model.reward_kwargs.max_resp_len": 8192, "trainer.total_epochs": 10, "trainer.resume_mode": "auto",
        "trainer.log_val_generations": 2, "trainer.experiment_name": "gspo-Qwen2.5-3B-Instruct-RL",
        "trainer.default_local_dir": "/rl/checkpoints", "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8,
        "trainer.save_freq": 10, "trainer.test_freq": 10,
        "trainer.val_before_train": False, "trainer.logger": ["console", "wandb"], "trainer.project_name": "RL-GSPO",
    }),
}  # fmt: skip

_INSTRUCT = {
    "beta": 0.0, "num_mini_batches": 1, "learning_rate": 1e-6, "per_device_train_batch_size": 1,
    "dataset_mixer_list_splits": "train", "temperature": 1.0, "deepspeed_stage": 3, "vllm_tensor_parallel_size": 1,
    "lr_scheduler_type": "constant", "apply_verifiable_reward": True, "seed": 1, "gradient_checkpointing": True,
    "with_tracking": True,
}  # fmt: skip

_INSTRUCT_2026 = "e6c3044aa6201c8bfa4573c1b03142af599e730d"

OPEN_INSTRUCT = {
    "olmo3-2026": Example("allenai/open-instruct", "scripts/train/olmo3/7b_rlzero_math.sh", _INSTRUCT_2026, {
        **_INSTRUCT, "num_nodes": 9, "gpus": 8, "exp_name": "olmo3_7b_rlzero_math", "no_resampling_pass_rate": 0.875,
        "active_sampling": True, "num_samples_per_prompt_rollout": 8, "num_unique_prompts_rollout": 32,
        "kl_estimator": 2, "dataset_mixer_list": ["allenai/Dolci-RLZero-Math-7B", 1.0],
        "dataset_mixer_eval_list": ["allenai/Dolci-RLZero-Math-7B", 16],
        "dataset_mixer_eval_list_splits": ["train", "train"], "max_prompt_token_length": 2048,
        "response_length": 16384, "pack_length": 18432, "model_name_or_path": "allenai/Olmo-3-1025-7B",
        "chat_template_name": "olmo_thinker_rlzero", "non_stop_penalty": False, "total_episodes": 768000,
        "num_learners_per_node": [8, 8], "vllm_num_engines": 56, "local_eval_every": 25, "save_freq": 100,
        "checkpoint_state_freq": 100, "vllm_enable_prefix_caching": True, "mask_truncated_completions": False,
        "oe_eval_max_length": 32768, "try_launch_beaker_eval_jobs_on_weka": True, "eval_priority": "high",
        "eval_on_step_0": True, "oe_eval_gpu_multiplier": 4,
    }),
    "qwen3-4b": Example("allenai/open-instruct", "scripts/train/qwen/qwen3_4b_dapo_math.sh", _INSTRUCT_2026, {
        **_INSTRUCT, "run_name": "qwen3_4b_base_dapo", "exp_name": "qwen3_4b_base_dapo", "eval_pass_at_k": 32,
        "eval_top_p": 0.95, "vllm_top_p": 1.0, "async_steps": 4, "active_sampling": True, "inflight_updates": True,
        "advantage_normalization_type": "centered", "num_samples_per_prompt_rollout": 16,
        "num_unique_prompts_rollout": 8, "dataset_mixer_list": ["hamishivi/DAPO-Math-17k-Processed_filtered", 1.0],
        "dataset_mixer_eval_list": ["allenai/aime_2025_openinstruct", 1.0, "allenai/brumo_2025_openinstruct", 1.0],
        "dataset_mixer_eval_list_splits": "train", "max_prompt_token_length": 2048, "response_length": 8192,
        "pack_length": 10240, "model_name_or_path": "Qwen/Qwen3-4B-Base", "non_stop_penalty": False,
        "total_episodes": 128000, "deepspeed_stage": 2, "num_learners_per_node": 4, "vllm_num_engines": 4,
        "local_eval_every": 100, "save_freq": 100, "checkpoint_state_freq": 100, "send_slack_alerts": True,
        "vllm_enable_prefix_caching": True, "clip_higher": 0.272, "mask_truncated_completions": False,
        "chat_template": "qwen_instruct_user_boxed_math", "load_ref_policy": False, "keep_last_n_checkpoints": -1,
        "push_to_hub": False,
    }),
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

_TRL_1_10 = "f2cd57710ae345ea6428ae95363267fcf38a3dc8"
_COMMAND = {"model_name_or_path": "Qwen/Qwen2.5-7B", "dataset_name": "my/data", "reward_funcs": "accuracy_reward",
            "max_steps": 1000, "use_vllm": True}  # fmt: skip
"""What those who follow a page of TRL's own give beside the settings of the page."""


def _page(section: str, **keys: Any) -> Example:
    return Example("huggingface/trl", f"docs/source/paper_index.md: {section}", _TRL_1_10, {**_COMMAND, **keys})


TRL = {
    "gspo": _page("Group Sequence Policy Optimization", importance_sampling_level="sequence", loss_type="grpo",
                  beta=0.0, epsilon=3e-4, epsilon_high=4e-4, gradient_accumulation_steps=1, steps_per_generation=4),
    "dapo": _page("DAPO", mask_truncated_completions=True, loss_type="dapo", epsilon_high=0.28, epsilon=0.2,
                  per_device_train_batch_size=512, num_generations=16, max_completion_length=20480, beta=0.0),
    "dr-grpo": _page("Understanding R1-Zero-Like Training", loss_type="dr_grpo", per_device_train_batch_size=8,
                     num_generations=8, max_completion_length=3000, beta=0.0, scale_rewards=False),
    "intellect-2": _page("INTELLECT-2", delta=4, epsilon=0.2, beta=0.001, num_generations=16, learning_rate=3e-7,
                         per_device_train_batch_size=16),
    "cispo": _page("ScaleRL", loss_type="cispo", epsilon_high=5.0, num_generations=16, scale_rewards="batch",
                   cast_lm_head_to_fp32=True, per_device_train_batch_size=16),
    "masked": _page("Masked Importance Sampling", vllm_importance_sampling_correction=True,
                    vllm_importance_sampling_mode="sequence_mask", vllm_importance_sampling_clip_max=2.0,
                    vllm_importance_sampling_clip_min=0.5),
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
