"""The environment and imports of learner and engine processes, and the command by which Ray starts them.

Imports neither torch nor Ray: templates run before Ray.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.engine.vllm import engine_environment
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.contract import PYTHON_VARIABLES
from hpc_grpo.system.hugging_face import find_model, read_settings

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_GPU_LEARNER_THREADS = 16
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch reads only the first variable that is set."""

MODULES = {
    "learner": (
        "hpc_grpo.learner.learner",
        "hpc_grpo.learner.publish",
        "hpc_grpo.learner.checkpoint",
        "deepspeed",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "transformers.models.auto.modeling_auto",
        "transformers.optimization",
        "transformers.models.{model_type}.modeling_{model_type}",
    ),
    "engine": (
        "hpc_grpo.engine.sampler",
        "hpc_grpo.engine.episodes",
        "vllm.v1.engine.llm_engine",
        "hpc_grpo.engine.receive",
        "vllm.v1.worker.{device}_worker",
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
        "vllm.model_executor.models.{model_type}",
    ),
}
"""For each kind of actor, the modules with a long import that it needs before it is ready."""


def uses_cuda(config: Config) -> bool:
    """Return whether the models compute on GPUs; `auto` looks for the NVIDIA driver, without importing torch."""
    if config.model.device == "auto":
        return _NVIDIA_DRIVER.exists()
    return config.model.device == "cuda"


def learner_environment(config: Config, environ: Mapping[str, str], *, on_gpu: bool) -> dict[str, str]:
    """Return the variables that a learner's process needs on top of `environ`, before torch is imported."""
    # On a GPU node these threads run the optimizer of an offloading learner; no other process needs the cores.
    threads = str(config.train.num_threads or (_GPU_LEARNER_THREADS if on_gpu else 1))
    variables = {
        "OMP_NUM_THREADS": threads,
        # Threads that spin for long occupy the engines' cores; threads that never spin train half as fast.
        "GOMP_SPINCOUNT": "10000",
        "DS_ACCELERATOR": "cuda" if on_gpu else "cpu",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # numpy's own threads: unused, and a process with threads cannot be a template.
        "OPENBLAS_NUM_THREADS": "1",
    }
    if on_gpu:
        # Otherwise NCCL's watchdog polls our store from a C++ thread, to dump traces that nobody reads.
        variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] = environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    if on_gpu and not any(environ.get(name) for name in _ALLOCATOR_VARIABLES):
        # Microbatches differ in length, and blocks of fixed sizes leave gaps between them. Engines allocate their
        # memory once and do not set this: vLLM refuses it for a KV cache registered with a network.
        variables[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    return variables


def runtime_env(kind: str, config: Config, *, on_gpu: bool) -> dict[str, Any]:
    """Return Ray's runtime environment of an actor of `kind`. bash expands the variable in `py_executable`."""
    python = f"${{{PYTHON_VARIABLES[kind]}:-{shlex.quote(sys.executable)}}}"
    return {"env_vars": _environment(kind, config, on_gpu=on_gpu), "py_executable": python}


def prepare(kind: str, config: Config) -> list[str]:
    """Give this process the variables of an actor of `kind`. Return the modules with a long import."""
    on_gpu = uses_cuda(config)
    os.environ.update(_environment(kind, config, on_gpu=on_gpu))
    try:
        model_type = read_settings(find_model(config.model.path))["model_type"]
    except ConfigError:  # the driver will refuse the model's folder
        model_type = "auto"
    model_type = str(model_type).removesuffix("_text")  # gemma3_text is in the modules of gemma3
    return [module.format(model_type=model_type, device="gpu" if on_gpu else "cpu") for module in MODULES[kind]]


def _environment(kind: str, config: Config, *, on_gpu: bool) -> dict[str, str]:
    if kind == "learner":
        return learner_environment(config, os.environ, on_gpu=on_gpu)
    return engine_environment(config, on_gpu=on_gpu)
