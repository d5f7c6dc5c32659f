"""How long a step should take on GPUs, from their peaks and an assumed share of them: expected, not measured.

Training is bound by arithmetic, F P T / (W c): F FLOPs a parameter and token (6, or 8 where gradient checkpointing
repeats the forward pass), P parameters, T tokens, W learners, c the FLOP/s one reaches (Kaplan et al. 2020, section
2.1). Decoding is bound by memory: each token of a batch reads the weights and the batch's KV cache once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path

from hpc_grpo.config.resources import expects_gpus, gpus_per_node
from hpc_grpo.data.sources import load_items
from hpc_grpo.driver.train_length import train_length
from hpc_grpo.errors import ConfigError
from hpc_grpo.plan.fit import Plan
from hpc_grpo.plan.learner import is_checkpointed
from hpc_grpo.plan.workload import workload

TRAINING_SHARE = 0.4
"""Of the peak FLOP/s. Assumed."""
DECODING_SHARE = 0.6
"""Of the peak memory bandwidth. Assumed."""
_WEIGHT_BYTES = 2


@dataclass(frozen=True)
class ExpectedStep:
    """Seconds of a step whose every sequence is as long as it may be; `overlaps`: sampling goes on while training."""

    sample_s: float
    train_s: float
    overlaps: bool
    num_gpus: int

    @property
    def step_s(self) -> float:
        return max(self.sample_s, self.train_s) if self.overlaps else self.sample_s + self.train_s

    def gpu_hours(self, num_steps: int) -> float:
        return num_steps * self.step_s * self.num_gpus / 3600


def expected_step(plan: Plan) -> ExpectedStep | None:
    """None on CPUs, without engines, and where an engine holds no sequence of full length."""
    load, cache, config = workload(plan), plan.kv_cache, plan.config
    if not expects_gpus(config) or cache is None or load.max_tokens is None or not load.running_sequences:
        return None
    parameters, hardware = plan.model.num_parameters, plan.hardware
    flops = (8 if is_checkpointed(config, on_gpu=True) else 6) * parameters * load.max_tokens
    weights = _WEIGHT_BYTES * parameters / config.engine.tensor_parallel
    running = min(load.running_sequences, load.sequences_per_engine)
    half_full = running * config.max_model_len / 2 * cache.bytes_per_token
    batches = ceil(load.sequences_per_engine / running)
    return ExpectedStep(
        sample_s=batches
        * config.rollout.max_new_tokens
        * (weights + half_full)
        / (hardware.gpu_bytes_per_s * DECODING_SHARE),
        train_s=flops / (plan.num_learners * hardware.gpu_flops_per_s * TRAINING_SHARE),
        overlaps=config.rollout.max_policy_lag > 0,
        num_gpus=plan.num_nodes * gpus_per_node(config),
    )


def num_steps(plan: Plan) -> int | None:
    """None where the run's length depends on data that is no file here, or no readable one."""
    config, data = plan.config, plan.config.data.train
    if config.train.total_epochs is None:
        return train_length(config, 1).total_steps
    try:
        return train_length(config, len(load_items(data))).total_steps if Path(data.path).is_file() else None
    except ConfigError:
        return None
