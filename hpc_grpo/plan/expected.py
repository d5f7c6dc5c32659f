"""Expect a step's time from the peaks of GPUs, links and memory, and assumed shares of them; nothing here was measured.

Nobody knows before sampling how long completions get: times are those of sequences as long as may be, or of completions
that are all as long as somebody assumes. Not counted: prefill, publishing, grading, and microbatches that are not full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpc_grpo.config import Config
from hpc_grpo.config.resources import expects_gpus, gpus_per_node, schedules_ahead, trained_parameters
from hpc_grpo.plan.engine_memory import KvCache
from hpc_grpo.plan.fit import Plan
from hpc_grpo.plan.learner_memory import is_checkpointed
from hpc_grpo.plan.step import Workload, workload
from hpc_grpo.simulate.rates import Rate
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


@dataclass(frozen=True)
class DecodeRate(Rate):
    """Give the seconds of a decode step of n sequences: `fixed_s` + `part_s` n on the GPU, and those of the CPU.

    The KV cache holds `held` sequences of average length. vLLM starts more and preempts some of them once it is full:
    then n sequences take turns. A CPU that `is_ahead` works while the GPU does (vLLM's async_scheduling).
    """

    held: float
    is_ahead: bool

    def __call__(self, parts: float) -> float:
        turns = max(1.0, parts / self.held)
        gpu_s, cpu_s = super().__call__(parts / turns), CPU_DECODING(parts / turns)
        return turns * (max(gpu_s, cpu_s) if self.is_ahead else gpu_s + cpu_s)


@dataclass(frozen=True)
class ExpectedRates:
    """`decoding`: a decode step of n sequences in one engine.

    `training`: a step of n sampled tokens in one learner, with their prompts.
    """

    decoding: DecodeRate
    training: Rate


@dataclass(frozen=True)
class ExpectedStep:
    """Seconds of a step of completions that are all as long; `overlaps`: sampling goes on while training.

    Where groups are replaced, a step samples up to `most_rounds` times as many.
    """

    sample_s: float
    train_s: float
    overlaps: bool
    num_gpus: int
    most_rounds: int = 1

    @property
    def step_s(self) -> float:
        return self.ahead_s if self.overlaps else self.in_turn_s

    @property
    def in_turn_s(self) -> float:
        """The step where learners wait for engines and engines for learners (rollout.max_policy_lag = 0)."""
        return self.sample_s + self.train_s

    @property
    def ahead_s(self) -> float:
        """The step where engines sample the next one's prompts while learners train."""
        return max(self.sample_s, self.train_s)

    @property
    def at_worst(self) -> ExpectedStep:
        """The step whose every replacement is sampled (rollout.dynamic_sampling)."""
        return replace(self, sample_s=self.most_rounds * self.sample_s)

    def gpu_hours(self, num_steps: int) -> float:
        return num_steps * self.step_s * self.num_gpus / 3600


def expected_step(plan: Plan, tokens: float | None = None) -> ExpectedStep | None:
    """Return what a step of completions of so many tokens should take, else of as many as may be.

    None on CPUs, without engines, and where an engine holds no full sequence.
    """
    load, tokens = workload(plan), tokens or plan.config.rollout.max_new_tokens
    rates = expected_rates(plan, tokens)
    if rates is None:
        return None
    at_once = plan.config.engine.max_num_seqs
    full, rest = divmod(load.sequences_per_engine, at_once)
    decode_s = full * rates.decoding(at_once) + (rates.decoding(rest) if rest else 0.0)
    return ExpectedStep(
        sample_s=tokens * decode_s,
        train_s=rates.training(load.num_sequences * tokens / plan.num_learners),
        overlaps=plan.config.rollout.max_policy_lag > 0,
        num_gpus=plan.num_nodes * gpus_per_node(plan.config),
        most_rounds=plan.config.rollout.dynamic_sampling or 1,
    )


def expected_rates(plan: Plan, tokens: float) -> ExpectedRates | None:
    """Return the rates where a sampled token is one of a completion of so many; None where no step is expected."""
    config, cache = plan.config, plan.kv_cache
    if not expects_gpus(config) or cache is None or not cache.num_sequences:
        return None
    average = config.data.max_prompt_tokens + tokens / 2
    return ExpectedRates(_decoding(plan, cache, average), _training(plan, workload(plan)))


def _decoding(plan: Plan, cache: KvCache, average: float) -> DecodeRate:
    """Rate a decode step of sequences that have `average` tokens: a prompt and half of a completion.

    It is bound by memory: each token of a batch reads the weights and the batch's KV cache once.
    """
    parallel, hardware = plan.config.engine.tensor_parallel, plan.hardware
    byte_s = 1 / (hardware.gpu_bytes_per_s * READING_SHARE)
    weights = DTYPE_BYTES[plan.config.engine_dtype] * plan.model.num_parameters / parallel
    once, each = _all_reduces(plan) if parallel > 1 else (0.0, 0.0)
    return DecodeRate(
        fixed_s=weights * byte_s + once,
        part_s=average * cache.bytes_per_token * byte_s + each,
        held=cache.num_sequences_of(average),
        is_ahead=schedules_ahead(plan.config, on_gpu=True),
    )


def _all_reduces(plan: Plan) -> tuple[float, float]:
    """Return the seconds that tensor parallelism adds to a decode step, and for each sequence in it.

    Those are two all-reduces a layer, of the sequences' hidden states.
    """
    shape, parallel = plan.model.shape, plan.config.engine.tensor_parallel
    sent = 2 * (parallel - 1) / parallel * shape.hidden_size * DTYPE_BYTES[plan.config.engine_dtype]
    count = 2 * shape.num_layers
    return count * ALL_REDUCE_S, count * sent / (plan.hardware.nvlink_bytes_per_s * NETWORK_SHARE)


def _training(plan: Plan, load: Workload) -> Rate:
    """Rate a learner's part of a step.

    Arithmetic is F P T / (W c): F FLOPs a parameter and token, P parameters, T tokens, W learners, c the FLOP/s one
    reaches (Kaplan et al. 2020, section 2.1). DeepSpeed moves the bytes of a microbatch behind it (`overlap_comm`,
    ZeRO-3's prefetch); those of the optimizer step follow.
    """
    config, hardware, workers = plan.config, plan.hardware, plan.num_learners
    parameters = trained_parameters(config, plan.model.num_parameters)
    reference = (plan.model.reference_parameters or plan.model.num_parameters) * config.needs.reference
    flops = _flops_per_token(config) * parameters + 2 * (reference + plan.model.teacher_parameters)
    in_microbatch, in_step = _communicated_bytes(config)
    shard_s = parameters / workers / (hardware.host_link_bytes_per_s * READING_SHARE)
    is_offloaded = config.train.offload_optimizer != "none"
    # A gradient sum that lies in host memory comes to the GPU to be added to, and goes back.
    microbatch_s = in_microbatch * _exchange_s(plan) + 8 * shard_s * is_offloaded
    step_s = in_step * _exchange_s(plan) + _host_update_s(plan) * is_offloaded
    tokens, sampled = (load.learner_tokens or 0) / workers, (load.max_new_tokens or 0) / workers
    token_s = max(
        flops / (hardware.gpu_flops_per_s * TRAINING_SHARE), (load.num_microbatches or 0) * microbatch_s / tokens
    )
    return Rate(config.train.num_minibatches * step_s + (tokens - sampled) * token_s, token_s)


def _flops_per_token(config: Config) -> float:
    """Return F: 2 forward and 4 backward, and 2 for each further forward pass over all or some of the tokens.

    Those are gradient checkpointing's, and the proximal logprobs' of those minibatches that need one: all but the
    first, unless the loss compares all tokens of a minibatch or `loss.proximal` is interpolated, and
    none with engine.
    """
    proximal = 1.0 - 1.0 / config.train.num_minibatches
    if config.loss.proximal == "engine":
        proximal = 0.0
    elif config.loss.compares_minibatch or config.loss.correction.compares_minibatch:
        proximal = 1.0
    elif config.loss.proximal == "interpolated":
        proximal = 0.0
    return 6 + 2 * is_checkpointed(config, on_gpu=True) + 2 * proximal


def _communicated_bytes(config: Config) -> tuple[int, int]:
    """Return the bytes a parameter that learners exchange in a microbatch and in an optimizer step (DeepSpeed 0.19.8).

    Gradients travel in float32. Stage 1 all-reduces them once a step (4 there, 4 back), stage 2 in every microbatch
    (`use_multi_rank_bucket_allreduce`); both gather the new weights. Stage 3 gathers weights for the forward and the
    backward pass of every microbatch, and scatters the gradients' sum.
    """
    weights = DTYPE_BYTES[config.model.dtype]
    return {1: (0, 8 + weights), 2: (8, weights), 3: (2 * weights + 4, 0)}[config.train.zero_stage]


def _exchange_s(plan: Plan) -> float:
    """Return the seconds for one byte a parameter between all learners, in rings through each learner's own link."""
    hardware, workers = plan.hardware, plan.num_learners
    if plan.num_nodes > 1:
        bandwidth = hardware.network_bytes_per_s * plan.config.placement.learners_per_node
    else:
        bandwidth = hardware.nvlink_bytes_per_s
    parameters = trained_parameters(plan.config, plan.model.num_parameters)
    return parameters * (workers - 1) / workers / (bandwidth * NETWORK_SHARE)


def _host_update_s(plan: Plan) -> float:
    """Return the seconds of AdamW in host memory: about 40 bytes read and written for each parameter of a shard."""
    shard = trained_parameters(plan.config, plan.model.num_parameters) / plan.num_learners
    return 40 * shard / (plan.hardware.host_memory_bytes_per_s * HOST_SHARE)
