"""Starts vLLM's engine, with its environment variables and options.

Runs in the engine's process. `hpc-grpo config --env` imports it too, without vLLM.
"""

from __future__ import annotations

import tempfile
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.config.resources import kv_cache_gib, max_batched_tokens, schedules_ahead
from hpc_grpo.config.rules import check_engine, check_vllm_names
from hpc_grpo.data.images import MAX_IMAGES
from hpc_grpo.system.gpus import wait_for_free_gpus
from hpc_grpo.system.hugging_face import find_model, linear_layers
from hpc_grpo.types import GIB

_CPU_ENVIRONMENT = {
    # Otherwise the first generate compiles a logprob kernel for ten seconds.
    "TORCHDYNAMO_DISABLE": "1",
    # Engines of one node share its cores. Engines bound to the same cores would wait for each other.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""Speculation by prompt lookup: if the last N tokens occurred before, vLLM guesses the tokens that followed then."""

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` that vLLM accepts."""

_READ = {"gpu_memory_utilization", "max_num_batched_tokens", "async_scheduling", "speculative_config"}
"""Arguments of `engine.vllm` from which other options are computed. The rest is passed to vLLM unchanged."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # No threads of numpy: they are unused, and a process with threads cannot be a template (template/server.py).
    "OPENBLAS_NUM_THREADS": "1",
    # vLLM's Gloo groups have no password, so they only use loopback: an engine's workers share a node.
    "GLOO_SOCKET_IFNAME": "lo",
    # The same for NCCL, whose bootstrap listens. The data uses NVLink or PCIe anyway.
    "NCCL_SOCKET_IFNAME": "=lo",
}


def engine_environment(config: Config, *, on_gpu: bool) -> dict[str, str]:
    """Return the variables that an engine's process needs before vLLM is imported."""
    if on_gpu:
        return dict(ENVIRONMENT)
    return {**ENVIRONMENT, **_CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(config.engine.num_threads)}


def engine_options(config: Config, *, on_gpu: bool, reads_weights: bool = False) -> dict[str, Any]:
    """Return the keyword arguments of vllm.EngineArgs.

    Weights start as dummies, because the first publish loads the learner's. `reads_weights`: load the weights of
    `model.path`, which an engine without learners needs. Engines that only get adapters always load `model.path`. Makes
    a temporary folder if `metrics.profile_steps` is set. Raises the ConfigError of `check_engine`.
    """
    check_engine(config, on_gpu=on_gpu)
    engine = config.engine
    options: dict[str, Any] = {
        "model": config.model.path,
        "trust_remote_code": False,
        "dtype": config.engine_dtype,
        "hf_overrides": {"head_dtype": config.model.head_dtype},
        "seed": config.run.seed,
        "load_format": "auto" if reads_weights or config.publishes_adapter else "dummy",
        "skip_tokenizer_init": not config.rollout.stop,  # vLLM searches for stop texts in the decoded text
        "max_model_len": config.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": max_batched_tokens(config, on_gpu=on_gpu),
        # Must be off on CPU (engine/sampler.py). None: vLLM's default for the model.
        "enable_chunked_prefill": None if on_gpu else False,
        "tensor_parallel_size": engine.tensor_parallel,
        # vLLM stores the experts of cached tokens on GPU only.
        "enable_prefix_caching": on_gpu or not config.train.router_replay,
        # Only full blocks are cached. On CPU vLLM's default is 128 tokens, more than many prompts have.
        "block_size": None if on_gpu else 32,
        # Calls that change weights or caches still wait until no step is running (`StepLoop`).
        "async_scheduling": schedules_ahead(config, on_gpu=on_gpu),
        # In order of arrival, but urgent requests first: the probe of a publish, and evals during rollouts.
        "scheduling_policy": "priority",
        # Logprobs after temperature and top_p. Raw logprobs differ from these by 0.5 nats at temperature 0.7.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "hpc_grpo.engine.receive.WeightReceiver",
        "distributed_executor_backend": "uni" if engine.tensor_parallel == 1 else "mp",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **{name: value for name, value in engine.vllm.items() if name not in _READ and value is not None},
        "enforce_eager": engine.vllm.get("enforce_eager", False) or not on_gpu,
    }
    if config.metrics.profile_steps is not None:
        options["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": tempfile.mkdtemp(prefix="hpc-grpo-profile-"),
            "torch_profiler_with_stack": False,  # pyinstrument records stacks at a lower cost
        }
    if config.data.images is not None:
        options |= {
            "skip_tokenizer_init": False,
            "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0},
            # Otherwise Qwen2.5-VL normalises pixels by its buffers, and load_format "dummy" fills these with noise.
            "mm_device_do_normalize": False,
        }
    if config.publishes_adapter:
        lora = config.lora
        assert lora is not None
        layers = linear_layers(find_model(config.model.path)) if lora.targets == "all-linear" else lora.targets
        options |= {
            "enable_lora": True,
            "max_loras": 2,  # vLLM on CPU uses the last slot even without a request
            "max_lora_rank": next(rank for rank in _LORA_RANKS if rank >= lora.rank),
            # Without targets vLLM would give the output layer an adapter too, which takes most of the time on CPU.
            "lora_target_modules": sorted({name.rpartition(".")[2] for name in layers}) or None,
        }
    if config.train.router_replay and on_gpu:
        options["enable_return_routed_experts"] = True
    if config.placement.colocate and on_gpu:  # a CPU build refuses the option, but accepts the calls
        options["enable_sleep_mode"] = True
    if guesses := engine.vllm.get("speculative_config"):
        options["speculative_config"] = {**_LOOKUP, **guesses}
    kv_gib = kv_cache_gib(config, on_gpu=on_gpu)
    if kv_gib is None:
        options["gpu_memory_utilization"] = engine.gpu_memory_utilization
    else:
        options["kv_cache_memory_bytes"] = int(kv_gib * GIB)
        if on_gpu:  # by default vLLM starts only where 92% of the GPU is free
            options["gpu_memory_utilization"] = 0.01
    return options


def start_vllm(config: Config, *, on_gpu: bool, reads_weights: bool = False) -> Any:
    """Start vLLM's LLMEngine in this process. In a separate process the start takes three times as long."""
    import torch
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    check_vllm_names(config)
    if not on_gpu:
        torch.cpu._init_amx()  # Linux grants AMX only on request; vLLM's bfloat16 attention does not request it
    arguments = EngineArgs(**engine_options(config, on_gpu=on_gpu, reads_weights=reads_weights))
    if on_gpu:
        wait_for_free_gpus(min(arguments.gpu_memory_utilization, 0.95))  # of an engine that this one replaces
    engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
    if config.train.router_replay and not on_gpu:
        _return_experts(engine)
    return engine


def _return_experts(engine: Any) -> None:
    """Let an engine on CPU add the experts of each token to completions: `enable_return_routed_experts` needs a GPU.

    Needs prompts that are neither cached nor split. A request that is computed again keeps its first experts, as on a
    GPU: these chose its tokens.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        RoutedExpertsCapturer,
        bind_routed_experts_capturer,
    )

    runner, requests = engine.model_executor.driver_worker.model_runner, engine.output_processor.request_states
    capturer = RoutedExpertsCapturer(engine.vllm_config.scheduler_config.max_num_batched_tokens, engine.vllm_config)

    def split(*_: Any) -> None:
        """Give each request the rows of its tokens in this pass. vLLM joins them when the request ends."""
        request_ids, starts = runner.input_batch.req_ids, runner.query_start_loc.np
        rows = capturer.snapshot_routing_data(int(starts[len(request_ids)])).numpy()
        for index, request_id in enumerate(request_ids):
            chunks, end = requests[request_id].routed_experts_chunks, starts[index + 1]
            chunks.append(rows[end - 1 if chunks else starts[index] : end].copy())

    model = runner.get_model()
    bind_routed_experts_capturer(model, capturer)
    model.register_forward_hook(split)
