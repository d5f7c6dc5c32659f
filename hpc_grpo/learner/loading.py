"""Load a model for the packed forward pass, and refuse one that this cannot compute."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.attention import (
    PACKED_SDPA,
    PACKED_VARLEN,
    register_kernels,
    require_flash_attention,
    require_varlen_attention,
    takes_varlen,
)
from hpc_grpo.learner.model import PolicyModel, score
from hpc_grpo.learner.packing import pack
from hpc_grpo.run.contract import WEIGHTS_DIR_VARIABLE
from hpc_grpo.types import TrainSequence

_UNSUPPORTED_LOGIT_SCALING = {
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
}
"""Settings of a model that change its logits or scores outside the layers used here, and their neutral values."""

_PROBED_TOKENS = 16
_PROBED_DIFFERENCE = 0.05
"""Nats; the same numbers in the same order give the same log-probabilities, and rounding much less than this."""


def load_policy(
    config: Config, use_gradient_checkpointing: bool, path: str | None = None, key: str = "model.path"
) -> PolicyModel:
    """Load `model.path`, or the model at `path` that `key` names, for training.

    Raises ConfigError for a model that the packed forward pass cannot compute.
    """
    source = f"{key} = {path or config.model.path}"
    attention = _attention_kernel(config)
    dtype = getattr(torch, config.model.dtype)
    folder = path or os.environ.get(WEIGHTS_DIR_VARIABLE, config.model.path)
    language_model = _from_pretrained(folder, source, dtype=dtype, attn_implementation=attention)
    _check_model(language_model, config, source)
    _disable_dropout(language_model)
    if use_gradient_checkpointing:
        language_model.gradient_checkpointing_enable({"use_reentrant": False})
    # Gradient checkpointing acts in training mode only; with dropout at zero the mode changes nothing else.
    language_model.train()
    return PolicyModel(language_model, config)


def check_packing(model: PolicyModel, source: str, device: Any) -> None:
    """Compute a document twice in one row. Raises ConfigError where the second is not like the first.

    So are found, whatever the architecture: layers that mix tokens beside attention, an attention that is not told
    where documents begin, and what is left to chance. Under ZeRO-3 every rank must call it.
    """
    tokens = np.arange(_PROBED_TOKENS, dtype=np.int32) % model.language_model.get_input_embeddings().num_embeddings
    zeros = np.zeros(len(tokens), np.float32)
    probe = TrainSequence(0, 0, tokens, np.arange(len(tokens)) > 0, zeros, zeros)
    first, second = score(model, pack([probe, probe]).to(device)).chunk(2)
    difference = float((first - second).abs().max())
    if difference > _PROBED_DIFFERENCE:
        raise ConfigError(
            f"{source}: {type(model.language_model).__name__} computes a sequence otherwise where another one comes "
            f"before it in a packed row (log-probabilities differ by {difference:.2g}). Take a model of another "
            f"architecture; Llama's, Qwen's, Mistral's and most others keep them apart."
        )


def _attention_kernel(config: Config) -> str:
    """Return the name under which transformers has the kernel of `train.attention`. Raises ConfigError without it."""
    if config.train.attention == "flash_attention_2":
        require_flash_attention()
        return "flash_attention_2"
    register_kernels()
    if config.train.attention == "varlen":
        require_varlen_attention()
        return PACKED_VARLEN
    return PACKED_SDPA


def _from_pretrained(path: str, source: str, **kwargs: Any) -> Any:
    from transformers import AutoModelForCausalLM

    looks_local = path.startswith((".", "/", "~"))
    if looks_local and not Path(path).is_dir():
        raise ConfigError(f"{source}: no such folder. Give a Hugging Face model folder, or a name.")
    try:
        return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, **kwargs)
    except (OSError, ValueError, ImportError, KeyError) as error:
        # A KeyError: an architecture that looks its attention up in a table of its own, without this kernel.
        raise ConfigError(
            f"{source} cannot be loaded as a causal language model: {error}\n"
            f"It must be a folder with config.json and weights, or a name in the local Hugging Face cache."
        ) from error


def _check_model(language_model: Any, config: Config, source: str) -> None:
    settings = language_model.config
    context = getattr(settings, "max_position_embeddings", None)
    if config.needs.rollouts and context is not None and context < config.max_model_len:
        raise ConfigError(
            f"{source} has a context of {context} tokens, less than data.max_prompt_tokens + "
            f"rollout.max_new_tokens = {config.max_model_len}. Lower one of the two or take another model."
        )
    for name, neutral in _UNSUPPORTED_LOGIT_SCALING.items():
        if getattr(settings, name, neutral) not in (neutral, None):
            raise ConfigError(f"{source}: its {name} = {getattr(settings, name)} is not supported.")
    window = getattr(settings, "sliding_window", None)
    is_sliding = "sliding_attention" in (getattr(settings, "layer_types", None) or ["sliding_attention"])
    if config.train.attention == "sdpa" and window and is_sliding and window < config.max_model_len:
        raise ConfigError(
            f"{source} attends to a window of {window} tokens, less than the longest sequence "
            f"({config.max_model_len}). On a GPU set train.attention: varlen, or shorten the sequences."
        )
    head_size = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    if config.train.attention == "varlen" and not takes_varlen(head_size):
        raise ConfigError(
            f"{source} has heads of {head_size} channels; train.attention = varlen takes multiples of 8, up to 256. "
            f"Set train.attention: sdpa."
        )
    if any(isinstance(module, nn.Conv1d) for module in language_model.modules()):
        raise ConfigError(
            f"{source}: {type(language_model).__name__} mixes neighbouring tokens by convolutions beside its attention "
            f"(state-space and short-convolution layers do), across the sequences packed into one row. Take a model of "
            f"attention layers alone."
        )
    if "position_ids" not in inspect.signature(language_model.base_model.forward).parameters:
        raise ConfigError(f"{source}: {type(language_model).__name__} takes no position_ids for packing.")


def _disable_dropout(language_model: Any) -> None:
    """Set dropout to zero: ratios compare two passes over one sequence, which it would make differ by chance.

    Models have it as modules, or as numbers under names of their own (`dropout`, `attention_dropout`, `layerdrop`).
    """
    for module in language_model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
