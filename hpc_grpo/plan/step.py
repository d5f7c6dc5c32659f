"""Say what a step takes: its sequences and tokens, the time expected before the first, and the time measured since.

Nobody knows before sampling how long completions get: tokens and times are those of sequences as long as may be.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.config.resources import engines_per_node, expects_gpus, gpus_per_node
from hpc_grpo.data.sources import load_items
from hpc_grpo.driver.length import train_length
from hpc_grpo.errors import ConfigError
from hpc_grpo.plan.fit import Plan
from hpc_grpo.plan.learner_memory import is_checkpointed
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics, read_state

TRAINING_SHARE = 0.4
"""A share of the peak FLOP/s, assumed."""
DECODING_SHARE = 0.6
"""A share of the peak memory bandwidth, assumed."""
_WEIGHT_BYTES = 2
_STEP_TIME = "time/step_s"


@dataclass(frozen=True)
class Workload:
    """The sequences and tokens of a step. The two `max_` count a step of longest sequences; None: SFT.

    `running_sequences` is what one engine decodes at once then; `num_microbatches` what one learner trains on.
    """

    num_sequences: int
    max_tokens: int | None
    max_new_tokens: int | None
    sequences_per_engine: int
    running_sequences: int
    num_microbatches: int | None


@dataclass(frozen=True)
class ExpectedStep:
    """Seconds of a step of longest sequences; `overlaps`: sampling goes on while training."""

    sample_s: float
    train_s: float
    overlaps: bool
    num_gpus: int

    @property
    def step_s(self) -> float:
        return max(self.sample_s, self.train_s) if self.overlaps else self.sample_s + self.train_s

    def gpu_hours(self, num_steps: int) -> float:
        return num_steps * self.step_s * self.num_gpus / 3600


@dataclass(frozen=True)
class MeasuredSteps:
    """The newest attempt's steps. `num_nodes` is what they ran on; None where the attempt's record is gone."""

    median_step_s: float
    num_steps: int
    attempt: int
    num_nodes: int | None
    num_remaining_steps: int | None

    def node_hours_left(self, planned_nodes: int) -> float | None:
        """Return steps x seconds x nodes / 3600, on the nodes measured; None where the run's length is not known."""
        if self.num_remaining_steps is None:
            return None
        nodes = self.num_nodes or planned_nodes
        return self.num_remaining_steps * self.median_step_s * nodes / 3600


def workload(plan: Plan) -> Workload:
    config, cache = plan.config, plan.kv_cache
    if cache is None:
        return Workload(config.sft.batch_size, None, None, 0, 0, None)
    sequences = config.rollout.prompts_per_step * config.rollout.group_size
    engines = plan.num_nodes * engines_per_node(config)
    per_microbatch = max(1, config.train.max_tokens_per_microbatch // config.max_model_len)
    return Workload(
        num_sequences=sequences,
        max_tokens=sequences * config.max_model_len,
        max_new_tokens=sequences * config.rollout.max_new_tokens,
        sequences_per_engine=ceil(sequences / engines),
        running_sequences=min(config.engine.max_num_seqs, cache.num_sequences),
        num_microbatches=ceil(ceil(sequences / plan.num_learners) / per_microbatch),
    )


def expected_step(plan: Plan) -> ExpectedStep | None:
    """Return what a step should take on GPUs, from their peaks and an assumed share of them.

    None on CPUs, without engines, and where an engine holds no sequence of full length.

    Training is bound by arithmetic, F P T / (W c): F FLOPs a parameter and token (6, or 8 where gradient checkpointing
    repeats the forward pass), P parameters, T tokens, W learners, c the FLOP/s one reaches (Kaplan et al. 2020, section
    2.1). Decoding is bound by memory: each token of a batch reads the weights and the batch's KV cache once.
    """
    load, cache, config = workload(plan), plan.kv_cache, plan.config
    if not expects_gpus(config) or cache is None or load.max_tokens is None or not load.running_sequences:
        return None
    parameters, hardware = plan.model.num_parameters, plan.hardware
    flops = (8 if is_checkpointed(config, on_gpu=True) else 6) * parameters * load.max_tokens
    weights = _WEIGHT_BYTES * parameters / config.engine.tensor_parallel
    running = min(load.running_sequences, load.sequences_per_engine)
    half_full = running * config.max_model_len / 2 * cache.bytes_per_token
    batches = ceil(load.sequences_per_engine / running)
    read_bytes = batches * config.rollout.max_new_tokens * (weights + half_full)
    return ExpectedStep(
        sample_s=read_bytes / (hardware.gpu_bytes_per_s * DECODING_SHARE),
        train_s=flops / (plan.num_learners * hardware.gpu_flops_per_s * TRAINING_SHARE),
        overlaps=config.rollout.max_policy_lag > 0,
        num_gpus=plan.num_nodes * gpus_per_node(config),
    )


def num_steps(plan: Plan) -> int | None:
    """Return the run's length; None where it depends on data that is no file here, or no readable one."""
    config, data = plan.config, plan.config.data.train
    if config.train.total_epochs is None:
        return train_length(config, 1).total_steps
    try:
        return train_length(config, len(load_items(data))).total_steps if Path(data.path).is_file() else None
    except ConfigError:
        return None


def read_measured_steps(config: Config) -> MeasuredSteps | None:
    """Return what the run directory says of the steps already taken; None before the first."""
    run = RunDir(config.run_path)
    state = read_state(run)
    is_known = config.train.total_epochs is None
    total_steps = train_length(config, 1).total_steps if is_known else state.total_steps if state else None
    nodes = {record.attempt: len(record.nodes) for record in read_attempts(run)}
    return measured_steps(read_metrics(run.metrics), nodes, total_steps)


def measured_steps(
    metrics: Mapping[int, Mapping[str, Any]], nodes_by_attempt: Mapping[int, int], total_steps: int | None
) -> MeasuredSteps | None:
    """Return the newest attempt's steps in `metrics` (by step); None when none was measured."""
    timed = {step: line for step, line in metrics.items() if step > 0 and math.isfinite(line.get(_STEP_TIME, math.nan))}
    if not timed:
        return None
    last_step = max(timed)
    attempt = int(timed[last_step].get("attempt", 1))
    seconds = [line[_STEP_TIME] for line in timed.values() if line.get("attempt", 1) == attempt]
    remaining = None if total_steps is None else max(0, total_steps - last_step)
    return MeasuredSteps(statistics.median(seconds), len(seconds), attempt, nodes_by_attempt.get(attempt), remaining)
