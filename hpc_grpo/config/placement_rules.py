"""Rules of placement: an engine's batch, the attention kernel, a GPU that learner and engine share."""

from __future__ import annotations

from hpc_grpo.config.resources import check_sequence_parallel, expects_gpus
from hpc_grpo.config.schema import Config
from hpc_grpo.errors import ConfigError

MOST_BESIDE_A_LEARNER = 0.7
"""The largest share of a GPU's memory for an engine beside a learner's states."""


def _engine_batch(config: Config) -> None:
    given, num_seqs = config.engine.vllm.get("max_num_batched_tokens"), config.engine.max_num_seqs
    if config.needs.rollouts and given is not None and given < num_seqs:
        raise ConfigError(
            f"engine.vllm.max_num_batched_tokens = {given} must be at least engine.vllm.max_num_seqs = {num_seqs}: "
            "each decoding request takes one token of a step. Raise it, remove it, or lower engine.vllm.max_num_seqs."
        )


def _attention(config: Config) -> None:
    kernel = config.train.attention
    if kernel == "sdpa":
        return
    if config.model.device == "cpu":
        raise ConfigError(f"train.attention = {kernel} needs a GPU; with model.device = cpu choose sdpa.")
    if config.model.dtype == "float32":
        raise ConfigError(
            f"train.attention = {kernel} computes in 16 bits alone; with model.dtype = float32 choose sdpa."
        )


def _sequence_parallel(config: Config) -> None:
    degree, learners = config.train.sequence_parallel, config.placement.learners_per_node
    check_sequence_parallel(config, config.launch.num_nodes * learners)
    if config.launch.min_nodes is not None and learners % degree:
        raise ConfigError(
            f"train.sequence_parallel = {degree} must divide placement.learners_per_node = {learners} where a run may "
            f"continue with fewer nodes: launch.min_nodes = {config.launch.min_nodes}. Lower it, or set "
            f"launch.min_nodes=null."
        )
    if degree > 1 and config.train.attention == "flash_attention_2":
        raise ConfigError(
            f"train.sequence_parallel = {degree} needs train.attention = sdpa or varlen: flash_attention_2 does "
            f"not exchange heads with other learners. Set train.attention=varlen, or train.sequence_parallel=1."
        )


def _colocation(config: Config) -> None:
    if not config.placement.colocate:
        return
    engine, learners = config.engine, config.placement.learners_per_node
    if not config.needs.rollouts:
        raise ConfigError(f"placement.colocate = true, but task {config.task.name} has no engines. Set it to false.")
    if lag := config.rollout.max_policy_lag:
        raise ConfigError(
            "placement.colocate = true runs engines and learners in turns on a GPU. rollout.max_policy_lag = "
            f"{lag} runs both at the same time. Set rollout.max_policy_lag=0, or placement.colocate=false."
        )
    if engine.engines_per_node != learners or engine.tensor_parallel != 1:
        raise ConfigError(
            "placement.colocate = true puts one engine on each learner's GPU: engine.engines_per_node = "
            f"{engine.engines_per_node} must equal placement.learners_per_node = {learners}, and "
            f"engine.tensor_parallel = {engine.tensor_parallel} must be 1. Set engine.engines_per_node={learners} "
            "engine.tensor_parallel=1."
        )
    share = engine.gpu_memory_utilization
    if expects_gpus(config) and engine.kv_cache_gib is None and share > MOST_BESIDE_A_LEARNER:
        raise ConfigError(
            "placement.colocate = true keeps the learner's weights and optimizer on the GPU. "
            f"engine.vllm.gpu_memory_utilization = {share:g} leaves too little memory for them. Set it to "
            f"{MOST_BESIDE_A_LEARNER:g} or less, or set engine.kv_cache_gib. `hpc-grpo plan` shows what fits."
        )


def _staged_environment(config: Config) -> None:
    launch = config.launch
    if launch.container is not None and launch.stage.environment is not None:
        raise ConfigError(
            f"launch.stage.environment = {launch.stage.environment}, but Ray and training run in "
            f"launch.container.image = {launch.container.image} with its own Python. Set one of the two to null."
        )


PLACEMENT_RULES = (_engine_batch, _attention, _sequence_parallel, _colocation, _staged_environment)
