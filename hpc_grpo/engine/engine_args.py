"""From the run's config to vLLM's arguments; the only place that knows how CPU and GPU engines differ."""

from __future__ import annotations

from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.config.resources import kv_cache_gib
from hpc_grpo.types import GIB

CPU_ENVIRONMENT = {
    # The first generate would compile a logprob kernel for ten seconds.
    "TORCHDYNAMO_DISABLE": "1",
    # Engines of one node share its cores; each bound to the same ones would wait for the others.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # An engine's workers share a node: vLLM's Gloo groups, which know no password, need no other network.
    "GLOO_SOCKET_IFNAME": "lo",
}


def engine_environment(config: Config, *, on_gpu: bool) -> dict[str, str]:
    """Variables an engine's process needs before vLLM is imported."""
    if on_gpu:
        return dict(ENVIRONMENT)
    return {**ENVIRONMENT, **CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(config.engine.num_threads)}


def engine_options(config: Config, *, on_gpu: bool) -> dict[str, Any]:
    """Keyword arguments of vllm.EngineArgs. Weights start as dummies: version 0 comes from the learner."""
    engine = config.engine
    options: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "seed": config.run.seed,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": config.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "tensor_parallel_size": engine.tensor_parallel,
        "enable_prefix_caching": engine.prefix_caching,
        "enforce_eager": engine.enforce_eager or not on_gpu,
        # A step must have ended when `step` returns, or an update would race the one in flight.
        "async_scheduling": False,
        # Those of the distribution sampled from: raw ones are 0.5 nats off at temperature 0.7.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "hpc_grpo.engine.receive.WeightReceiver",
        "distributed_executor_backend": "uni" if engine.tensor_parallel == 1 else "mp",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    kv_gib = kv_cache_gib(config, on_gpu=on_gpu)
    if kv_gib is None:
        options["gpu_memory_utilization"] = engine.gpu_memory_utilization
    else:
        options["kv_cache_memory_bytes"] = int(kv_gib * GIB)
    return options
