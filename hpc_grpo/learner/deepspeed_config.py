"""From the typed configuration to DeepSpeed's dictionary."""

from __future__ import annotations

from typing import Any

from hpc_grpo.config import Config


def deepspeed_config(config: Config, world_size: int) -> dict[str, Any]:
    """The training configuration.

    Accumulation steps are 1 and the batch sizes nominal: microbatches are counted by the learner, which sets
    the accumulation boundary itself and divides by the global number of valid tokens.
    """
    is_bf16 = config.model.dtype == "bfloat16"
    settings: dict[str, Any] = {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.train.max_grad_norm,
        "steps_per_print": None,
        "bf16": {"enabled": is_bf16},
        "zero_optimization": _zero(config),
        # torch's AdamW everywhere: DeepSpeed's own CPU Adam compiles for 40 s at its first use.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if is_bf16:
        # Sums over many microbatches and ranks would lose small gradients in bfloat16.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        settings["communication_data_type"] = "fp32"
    return settings


def frozen_config(config: Config, world_size: int) -> dict[str, Any]:
    """The configuration of a reference model sharded by ZeRO-3: forward passes only, no optimizer."""
    return {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "zero_optimization": {"stage": 3},
    }


def _zero(config: Config) -> dict[str, Any]:
    stage = config.train.zero_stage
    zero: dict[str, Any] = {"stage": stage, "contiguous_gradients": True, "overlap_comm": True}
    if config.train.offload_optimizer == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return zero
