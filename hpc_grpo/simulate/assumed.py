"""Rates of a run before it starts, computed from the peaks of GPUs, links and memory, and assumed shares of them.

Nothing here was measured. Omits prefill, publishing, grading, and microbatches that are not full.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpc_grpo.algorithms.advantages import AdvantageSettings
from hpc_grpo.config import Config
from hpc_grpo.config.resources import expects_gpus, schedules_ahead, trained_parameters
from hpc_grpo.config.train import GrpoTask
from hpc_grpo.plan.budgets import is_checkpointed, policy_parameters
from hpc_grpo.plan.fit import Plan
from hpc_grpo.plan.step import workload
from hpc_grpo.simulate.cluster import Forecast, Setting, forecast
from hpc_grpo.simulate.rates import LOGNORMAL, DrawnStep, Rate, Rates, Sequences, cut_lengths, scale_of
from hpc_grpo.types import DTYPE_BYTES

TRAINING_SHARE = 0.4
"""A share of the peak FLOP/s, assumed."""
READING_SHARE = 0.6
"""A share of the peak bandwidth of a GPU's memory and of its link to the host, assumed."""
NETWORK_SHARE = 0.8
"""A share of the peak bandwidth between GPUs, in a node and between nodes, assumed."""
HOST_SHARE = 0.3
"""A share of the host memory's peak that torch's AdamW reaches on a learner's 16 threads, assumed."""
CPU_DECODING = Rate(0.002, 12e-6)
"""Seconds that a CPU takes to schedule a decode step of n sequences and to handle their tokens, assumed."""
ALL_REDUCE_S = 10e-6
"""Latency of an all-reduce between the GPUs of one engine, assumed."""
MEAN_SHARE = 0.25
"""The mean of the lengths, as a share of `Config.most_sampled`. Lengths are lognormal, cut at that limit. Assumed."""
ENVIRONMENT_S = 1.0
"""Mean seconds of an environment per turn, lognormal, assumed. An episode has the maximum number of turns."""
MOST_ROLLOUTS = 2048
"""Limit of simulated rollouts. For a larger step, only some nodes are simulated, with their share of the step."""
_ROLLOUTS, _MOST_STEPS = 8192, 100
"""A simulation counts about this many rollouts, in at most this many steps: it takes 0.1 to 0.2 s."""


class _Advantage(AdvantageSettings):
    """Finds groups of equal rewards without numpy, which a login node may lack."""

    name: Literal["simulated"] = "simulated"

    def of_rewards(self, rewards: Sequence[float], valid: Sequence[bool]) -> list[float]:
        return [reward - statistics.fmean(rewards) for reward in rewards]


@dataclass(frozen=True)
class DecodeRate(Rate):
    """The seconds of a decode step of n sequences: `fixed_s` + `part_s` n on the GPU, and the CPU's seconds.

    The KV cache holds `held` sequences of average length. vLLM starts more, and preempts some once the cache is full:
    then n sequences take turns. A CPU that `is_ahead` works while the GPU does (vLLM's async_scheduling).
    """

    held: float
    is_ahead: bool

    def __call__(self, parts: float) -> float:
        turns = max(1.0, parts / self.held)
        gpu_s, cpu_s = super().__call__(parts / turns), CPU_DECODING(parts / turns)
        return turns * (max(gpu_s, cpu_s) if self.is_ahead else gpu_s + cpu_s)


def longest_step(plan: Plan) -> tuple[float, float] | None:
    """Return the seconds of sampling, and the seconds of training, of a step whose completions have full length.

    None on CPUs, without engines, and if an engine's cache holds no full sequence: no time is known then.
    """
    load, config, cache = workload(plan), plan.config, plan.kv_cache
    if not expects_gpus(config) or load is None or cache is None or not cache.num_sequences:
        return None
    decoding, at_once = _decoding(plan, config.longest_rollout), config.engine.max_num_seqs
    full, rest = divmod(load.sequences_per_engine, at_once)
    decode_s = full * decoding(at_once) + (decoding(rest) if rest else 0.0)
    tokens = load.most_trained * config.most_sampled / config.train.sequence_parallel
    return config.most_sampled * decode_s, training_rate(plan)(tokens)


def simulated(plan: Plan, lag: int) -> Forecast | None:
    """Return a simulated forecast of the plan, with a long tail of completions' lengths; None if no time is known."""
    config, longest, load = plan.config, plan.config.most_sampled, workload(plan)
    if load is None or longest_step(plan) is None:
        return None
    scale = scale_of(LOGNORMAL, mean_tokens(config), longest)
    lengths = cut_lengths(LOGNORMAL, scale, longest)
    # A random token more likely belongs to a long completion than to a short one.
    likely = sum(length**2 for length in lengths) / sum(lengths)
    decoding = _decoding(plan, likely * (config.longest_rollout / longest))
    per_node = load.num_sequences / plan.num_nodes
    nodes = min(plan.num_nodes, max(1, int(MOST_ROLLOUTS / per_node)))
    # Steps that begin together end together. With a lag they come in bursts, so count whole bursts.
    ahead = lag // config.train.num_minibatches
    num_bursts = max(1, round(min(_MOST_STEPS, _ROLLOUTS / (per_node * nodes)) / (ahead + 1)))
    # Simulates a share of the prompts on a share of the nodes, without algorithms or advantages of the user's.
    prompts = max(1, round(nodes / plan.num_nodes * config.rollout.prompts_per_step))
    rollout = config.rollout.model_copy(update={"prompts_per_step": prompts})
    loss = config.loss.model_copy(update={"advantage": _Advantage()})
    sequences = Sequences(LOGNORMAL, config.data.max_prompt_tokens)
    if config.environments:
        sequences = replace(sequences, turns=config.most_turns, environment_s=ENVIRONMENT_S)
    engine = config.engine
    found = forecast(
        config.model_copy(update={"task": GrpoTask(), "rollout": rollout, "loss": loss}),
        Rates(decoding, training_rate(plan), (DrawnStep(scale),), sequences),
        Setting(nodes, config.placement.learners_per_node, engine.engines_per_node, lag, engine.tensor_parallel),
        num_steps=num_bursts * (ahead + 1),
        edge=ahead,
    )
    return replace(found, setting=replace(found.setting, nodes=plan.num_nodes))


def mean_tokens(config: Config) -> int:
    return max(1, round(MEAN_SHARE * config.most_sampled))


def _decoding(plan: Plan, tokens: float) -> DecodeRate:
    """Return the rate of a decode step. On average a sequence has its prompt and half of its `tokens` new tokens.

    Memory bounds a decode step: each step reads the weights and the KV cache of its sequences once. Tensor
    parallelism adds two all-reduces of the hidden states in each layer.
    """
    config, shape, cache = plan.config, plan.model.shape, plan.kv_cache
    assert cache is not None
    parallel, num_bytes = config.engine.tensor_parallel, DTYPE_BYTES[config.engine_dtype]
    byte_s = 1 / (plan.hardware.gpu_bytes_per_s * READING_SHARE)
    average = config.data.max_prompt_tokens + tokens / 2
    all_reduces = 2 * shape.num_layers if parallel > 1 else 0
    sent_bytes = 2 * (parallel - 1) / parallel * shape.hidden_size * num_bytes
    return DecodeRate(
        fixed_s=num_bytes * plan.model.num_parameters / parallel * byte_s + all_reduces * ALL_REDUCE_S,
        part_s=average * cache.bytes_per_token * byte_s
        + all_reduces * sent_bytes / (plan.hardware.nvlink_bytes_per_s * NETWORK_SHARE),
        held=cache.num_sequences_of(average),
        is_ahead=schedules_ahead(config, on_gpu=True),
    )


def training_rate(plan: Plan) -> Rate:
    """Return the rate of a learner's part of a step, for n sampled tokens with their prompts.

    The arithmetic takes F P T / (W c): F FLOPs per parameter and token, P parameters, T tokens, W learners, c the
    reached FLOP/s (Kaplan et al. 2020, section 2.1). A frozen parameter of LoRA's base model takes F - 2. DeepSpeed
    moves the bytes of a microbatch at the same time (`overlap_comm`, ZeRO-3's prefetch). The bytes of the optimizer
    step follow. An offloaded AdamW reads and writes 40 bytes a parameter.
    """
    config, hardware, workers, load = plan.config, plan.hardware, plan.num_learners, workload(plan)
    assert load is not None
    p, idle = plan.model.num_parameters, plan.model.shape.num_idle_parameters
    trained = policy_parameters(plan.model, config)[0] + p * config.needs.critic
    frozen = 0 if config.lora is None else p
    computing = trained + frozen - trained_parameters(config, idle)
    scoring = (plan.model.reference_parameters or p - idle) * config.needs.reference + plan.model.teacher_parameters
    # The backward pass goes through frozen weights, and computes no gradients of them.
    flops = _flops_per_token(config) * computing - 2 * max(0, frozen - idle) + 2 * scoring
    in_microbatch, in_step = _communicated_bytes(config, trained, frozen)
    # One byte between all learners, in rings through each learner's own link.
    between_nodes = hardware.network_bytes_per_s * config.placement.learners_per_node
    bandwidth = between_nodes if plan.num_nodes > 1 else hardware.nvlink_bytes_per_s
    byte_s = (workers - 1) / workers / (bandwidth * NETWORK_SHARE)
    shard, is_offloaded = trained / workers, config.train.offload_optimizer != "none"
    # A gradient sum in host memory is copied to the GPU, increased, and copied back.
    host_s = 8 * shard / (hardware.host_link_bytes_per_s * READING_SHARE)
    update_s = 40 * shard / (hardware.host_memory_bytes_per_s * HOST_SHARE)
    microbatch_s = in_microbatch * byte_s + host_s * is_offloaded
    step_s = in_step * byte_s + update_s * is_offloaded
    tokens, sampled = load.learner_tokens / workers, load.max_new_tokens / workers
    token_s = max(flops / (hardware.gpu_flops_per_s * TRAINING_SHARE), load.num_microbatches * microbatch_s / tokens)
    token_s += _exchange_s(plan)
    return Rate(config.train.num_minibatches * step_s + (tokens - sampled) * token_s, token_s)


def _exchange_s(plan: Plan) -> float:
    """Return the seconds of a learner's all-to-alls in its sequence-parallel group, per token of its slice.

    Each forward pass and the backward pass send queries, keys, values and results, of all heads but the learner's own.
    """
    config, shape, hardware = plan.config, plan.model.shape, plan.hardware
    degree = config.train.sequence_parallel
    passes = 2 + (_flops_per_token(config) - 6) / 2
    sent = 2 * (shape.attention_size + shape.kv_size) * DTYPE_BYTES[config.model.dtype] * (degree - 1) / degree
    is_on_node = config.placement.learners_per_node % degree == 0
    bandwidth = hardware.nvlink_bytes_per_s if is_on_node else hardware.network_bytes_per_s
    return passes * shape.num_layers * sent / (bandwidth * NETWORK_SHARE)


def _flops_per_token(config: Config) -> float:
    """Return F: 2 for the forward pass, 4 for the backward pass, and 2 for each further forward pass over the tokens.

    Further passes are for gradient checkpointing and proximal logprobs. All minibatches but the first need a proximal
    pass. All need one if the loss compares all tokens of a minibatch. None needs one if `loss.proximal` is engine, or
    if it is interpolated and the loss does not compare.
    """
    proximal = 1.0 - 1.0 / config.train.num_minibatches
    if config.loss.proximal == "engine":
        proximal = 0.0
    elif config.loss.compares_minibatch or config.loss.correction.compares_minibatch:
        proximal = 1.0
    elif config.loss.proximal == "interpolated":
        proximal = 0.0
    return 6 + 2 * is_checkpointed(config, on_gpu=True) + 2 * proximal


def _communicated_bytes(config: Config, trained: int, frozen: int) -> tuple[int, int]:
    """Return the bytes that learners exchange in a microbatch and in an optimizer step (DeepSpeed 0.19.8).

    `trained` and `frozen` count parameters. Gradients travel in float32. Stage 1 all-reduces them once a step (4 bytes
    each way), stage 2 in every microbatch (`use_multi_rank_bucket_allreduce`); both gather the new weights. Stage 3
    gathers weights for the forward and the backward pass of every microbatch, and scatters the gradients' sum.
    """
    size = DTYPE_BYTES[config.model.dtype]
    in_stages = {
        1: (0, (8 + size) * trained),
        2: (8 * trained, size * trained),
        3: (2 * size * (trained + frozen) + 4 * trained, 0),
    }
    return in_stages[config.train.zero_stage]
