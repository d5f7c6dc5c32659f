"""DeepSpeed's engine: builds it with optimizer, learning-rate schedule and frozen models, and takes optimizer steps."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpc_grpo.config import Config
from hpc_grpo.config.resources import REDUCE_BUCKET_ELEMENTS
from hpc_grpo.errors import ConfigError, HpcGrpoError
from hpc_grpo.learner.model import PolicyModel, check_packing, full_shape, load_policy
from hpc_grpo.run.pulse import PULSE
from hpc_grpo.system.usage import METER

Loss = Callable[[], Tensor]
"""Computes the sum of the token losses of a microbatch, with gradient."""

_FLOAT32_BUFFERS = ["inv_freq", "e_score_correction_bias"]
"""Parts of the names of buffers that ZeRO-3 must leave in float32.

`zero.Init` would round rotary frequencies to bfloat16. After a thousand tokens, angles would differ from the engines'
by radians. The bias that chooses a token's experts would lose what tells the experts apart.
"""


def resolve_device(config: Config) -> torch.device:
    """Return this learner's device. Raises ConfigError for `model.device: cuda` if torch sees no GPU."""
    if config.model.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device = cuda, but torch sees no GPU here. Set model.device to auto or cpu.")
    use_cuda = config.model.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")


def build_engine(
    config: Config,
    world_size: int,
    device: torch.device,
    total_optimizer_steps: int | None,
    changes: Iterable[Callable[[PolicyModel], None]],
) -> Any:
    """Load the policy, apply `changes`, and return its DeepSpeed engine; `.module` is the `PolicyModel`."""
    import deepspeed
    from transformers import get_scheduler

    settings, train = deepspeed_config(config, world_size), config.train
    with sharded_loading(settings):
        model = load_trained(config, device)
        for change in changes:
            change(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    # Vectors are biases and norms: they get no weight decay.
    has_decay = train.adamw["weight_decay"] > 0.0
    decayed = [p for p in parameters if len(full_shape(p)) > 1 and has_decay]
    others = [p for p in parameters if len(full_shape(p)) <= 1 or not has_decay]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    fit_buckets(settings, parameters)
    optimizer = torch.optim.AdamW(groups, lr=train.lr, **train.adamw, fused=True)
    if total_optimizer_steps is None and train.total_steps is not None:
        total_optimizer_steps = config.optimizer_steps(train.total_steps)
    name = "constant_with_warmup" if train.schedule == "constant" else train.schedule
    scheduler = get_scheduler(name, optimizer, train.warmup_steps, total_optimizer_steps)  # the learning-rate schedule
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings, dist_init_required=False
    )
    return engine


def load_trained(config: Config, device: torch.device, path: str | None = None, key: str = "model.path") -> PolicyModel:
    """Load `model.path`, or `path`, the value of `key`. Default of gradient checkpointing: on a GPU only."""
    checkpointing = config.train.gradient_checkpointing
    return load_policy(config, device.type == "cuda" if checkpointing is None else checkpointing, path, key)


def build_frozen(config: Config, world_size: int, device: torch.device, key: str) -> PolicyModel:
    """Load the model named by the config's `key` for scoring. Sharded under ZeRO-3."""
    import deepspeed

    path = config.models[key]
    load = partial(load_policy, config, use_gradient_checkpointing=False, path=path, key=key)
    if config.train.zero_stage == 3:
        settings = frozen_config(config, world_size)
        with sharded_loading(settings):
            model: PolicyModel = load().requires_grad_(False)
        deepspeed.initialize(model=model, config=settings, dist_init_required=False)
    else:
        model = load().requires_grad_(False).to(device)
    check_packing(model.eval(), f"{key} = {path}", device)
    return model


def deepspeed_config(config: Config, world_size: int) -> dict[str, Any]:
    """Return DeepSpeed's settings for training. Batch sizes are nominal: `optimizer_step` counts microbatches."""
    is_bf16 = config.model.dtype == "bfloat16"
    zero: dict[str, Any] = {"stage": config.train.zero_stage, "contiguous_gradients": True, "overlap_comm": True}
    if config.train.offload_optimizer == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    settings: dict[str, Any] = {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.train.max_grad_norm,
        "steps_per_print": None,
        "bf16": {"enabled": is_bf16},
        "zero_optimization": zero,
        # torch's AdamW everywhere: DeepSpeed's own CPU Adam compiles for 40 s at its first use.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if is_bf16:
        # Sums over many microbatches and ranks would lose small gradients in bfloat16.
        settings["data_types"] = {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": _FLOAT32_BUFFERS}
        settings["communication_data_type"] = "fp32"
    return settings


def frozen_config(config: Config, world_size: int) -> dict[str, Any]:
    """Return DeepSpeed's settings for a frozen model sharded by ZeRO-3: only forward passes, no optimizer."""
    return {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "data_types": {"keep_in_fp32_modules": _FLOAT32_BUFFERS},
        "zero_optimization": {"stage": 3},
    }


def fit_buckets(settings: dict[str, Any], parameters: Iterable[Any]) -> None:
    """Under ZeRO-2, let the largest gradient fit into a bucket.

    DeepSpeed 0.19.8 reduces a larger gradient in place on its second stream (`overlap_comm`), and learners that do not
    own it free its memory meanwhile (`reduce_independent_p_g_buckets_and_remove_grads`).
    """
    zero = settings["zero_optimization"]
    if zero["stage"] == 2:
        zero["reduce_bucket_size"] = max([REDUCE_BUCKET_ELEMENTS, *(math.prod(full_shape(own)) for own in parameters)])


@contextmanager
def sharded_loading(settings: dict[str, Any]) -> Iterator[None]:
    """Under ZeRO-3, let transformers load weights into their shards: no learner ever holds the complete model."""
    if settings["zero_optimization"]["stage"] != 3:
        yield
        return
    from transformers.integrations import HfDeepSpeedConfig

    # transformers keeps only a weak reference: the setting lasts as long as this variable.
    active = HfDeepSpeedConfig(settings)
    yield
    del active


def ask_cuda_for_free_memory(accelerator: Any) -> None:
    """Let DeepSpeed's `accelerator` ask CUDA for the free memory.

    DeepSpeed 0.19.8 asks NVML, and parses CUDA_VISIBLE_DEVICES as numbers. With UUIDs or MIG names, ZeRO-2 would fail.
    """
    accelerator.available_memory = lambda device=None: torch.cuda.mem_get_info(device)[0]


def prepare_libraries() -> None:
    """Quieten DeepSpeed and transformers. On a GPU, let CUDA tell the free memory. Before the first model is built."""
    import deepspeed
    from transformers.utils import logging as transformers_logging

    if torch.cuda.is_available():
        ask_cuda_for_free_memory(deepspeed.accelerator.get_accelerator())
    # DeepSpeed prints every setting at INFO, on every rank.
    deepspeed.utils.logging.logger.setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    # DeepSpeed calls collectives by names that torch has deprecated: one warning per microbatch.
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        warnings.filterwarnings("ignore", message=f".*{name}. is deprecated", category=FutureWarning)


def optimizer_step(ds_engine: Any, losses: Sequence[Loss], divisor: int, model: str, lr_key: str) -> float | None:
    """Accumulate the gradients of the microbatches and step. Return the gradient's norm before clipping.

    The sum of the losses is divided by `divisor`: the trained tokens, or the sequences, of all ranks. With divisor 0,
    every rank skips the step and returns None. Raises HpcGrpoError if the gradient is not finite: DeepSpeed would drop
    the update, and a checkpoint would hold a state that cannot be resumed.
    """
    if not divisor:
        _skip(ds_engine)
        return None
    # DeepSpeed averages gradients over ranks. Undo this, and divide their sum by `divisor`.
    scale = ds_engine.dp_world_size / divisor
    # Busy time ends at the last backward pass, which waits for the other ranks. A GPU's events measure when its work
    # ends, not when the work was launched.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if ds_engine.device.type == "cuda" else []
    begun = busy_until = time.monotonic()
    if events:
        events[0].record()
    for index, loss in enumerate(losses):
        is_last = index == len(losses) - 1
        ds_engine.set_gradient_accumulation_boundary(is_last)
        scaled = loss() * scale
        if is_last:
            busy_until = time.monotonic()
            if events:
                events[1].record()
        ds_engine.backward(scaled, scale_wrt_gas=False)
        del scaled  # otherwise its graph would stay in memory during the next microbatch
        PULSE.beat()
    ds_engine.step()
    grad_norm = float(ds_engine.get_global_grad_norm())  # synchronises a GPU
    METER.add_busy(events[0].elapsed_time(events[1]) / 1e3 if events else busy_until - begun)
    if not math.isfinite(grad_norm):
        raise HpcGrpoError(
            f"The gradient of the {model} in optimizer step {ds_engine.global_steps} is not finite ({grad_norm}). "
            f"Give a new run.name and a lower {lr_key}, or check that step's rollouts for broken logprobs or rewards."
        )
    return grad_norm


def _skip(ds_engine: Any) -> None:
    """Count a step without a trained token, and change no weights: old momentum and weight decay must not act.

    Counts the step like DeepSpeed counts skipped steps, so versions advance. The learning rate follows its schedule.
    """
    ds_engine.global_steps += 1
    ds_engine.skipped_steps += 1
    if ds_engine.lr_scheduler is None:
        return
    with warnings.catch_warnings():
        # If the very first step is skipped, torch warns that the schedule runs before the optimizer.
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before")
        ds_engine.lr_scheduler.step()
