"""Settings of models of transformers that are made in a moment, for tests of what the learner does with a family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_grpo.demo.model import ModelSize

TINY = ModelSize(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=96, max_tokens=64)
VOCABULARY = 50
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
TOKENS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.2}

_FAMILY = {**SHAPE, **HEADS, **TOKENS, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of 32 channels: vLLM's kernels for CPUs take no narrower ones."""
_SLIDING = {"sliding_window": 8, "head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16, "rope_theta": 5e5,
    }},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 64},
    "olmo2": {},
    "mistral": _SLIDING,
    "gemma3_text": {**_SLIDING, "query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "qwen3_moe": {
        "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 32
    },
}  # fmt: skip
"""The rows of docs/models.md: each `model_type` with what makes it one."""


def write_family(folder: Path, kind: str, **settings: Any) -> Path:
    """Write a model of random weights of a family, in float32; returns its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    described = AutoConfig.for_model(kind, **{**_FAMILY, **FAMILIES[kind], **settings})
    model = AutoModelForCausalLM.from_config(described)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # Gemma's begin at 0, all others' at 1: neither may pass for the other
            torch.nn.init.normal_(parameter.data, 1.0, 0.1)
    model.save_pretrained(folder)
    return folder
