"""What `gpu_learner_case.py` measures with: cases, configs, models with random weights, sequences, their FLOPs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpc_grpo.plan.model import FAMILY, ModelShape

PROMPT_TOKENS, GROUP = 256, 8
SHAPES = {**FAMILY, "toy": ModelShape(64, 2, 2, 1, 32, 128, 256, has_tied_embeddings=True, has_qkv_bias=True)}


@dataclass(frozen=True)
class Case:
    """What one process measures.

    `lengths`: `equal`, `ragged` (a long tail, drawn anew for each step), or `padded` (ragged, filled to the longest in
    every layer; fillings count as no tokens). `attention` is `train.attention`. With `uses_cudnn` torch may choose
    cuDNN's kernel, which learners switch off. With `shares_prompts` the eight sequences of a group have one prompt,
    which the learner computes once.
    """

    name: str
    size: str
    zero_stage: int = 1
    is_checkpointed: bool = True
    head_dtype: str = "float32"
    lengths: str = "equal"
    attention: str = "sdpa"
    uses_cudnn: bool = False
    shares_prompts: bool = False
    measures: str = "step"
    num_sequences: int = 64
    longest: int = 1024
    tokens_per_microbatch: int = 16384
    least_s: float = 4.0
    """Steps are timed for so long, three at least."""

    @property
    def prompt_tokens(self) -> int:
        return min(PROMPT_TOKENS, self.longest // 4)


def make_config(case: Case, folder: Path) -> Any:
    """Return the config of a run with this learner; writes the model when it is missing."""
    from hpc_grpo.config import Config

    return Config.model_validate(
        {
            "run": {"name": "gpu-learner", "root": str(folder)},
            "model": {"path": str(write_random_model(case.size, folder)), "head_dtype": case.head_dtype},
            "data": {"train": {"path": "none.jsonl"}, "max_prompt_tokens": case.prompt_tokens},
            "rollout": {"max_new_tokens": case.longest - case.prompt_tokens},
            "train": {
                "total_steps": 1000,
                "zero_stage": case.zero_stage,
                "gradient_checkpointing": case.is_checkpointed,
                "max_tokens_per_microbatch": case.tokens_per_microbatch,
                "share_prompts": case.shares_prompts,
                "attention": case.attention,
            },
        }
    )


def write_random_model(size: str, folder: Path) -> Path:
    """Write a Qwen2 model of this shape with random bfloat16 weights, once."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path, shape = folder / f"model-{size}", SHAPES[size]
    if path.exists():
        return path
    config = Qwen2Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate_size,
        tie_word_embeddings=shape.has_tied_embeddings,
        max_position_embeddings=32768,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(path)
    return path


def sequence_lengths(case: Case, step: int) -> list[int]:
    """Return the tokens of each sequence of a step: all as many, or a lognormal tail after prompts of one length."""
    import numpy as np

    if case.lengths == "equal":
        return [case.longest] * case.num_sequences
    drawn = np.random.default_rng(step).lognormal(np.log(case.longest / 6), 0.8, case.num_sequences)
    return [case.prompt_tokens + int(own) for own in np.clip(drawn, 4, case.longest - case.prompt_tokens)]


def random_sequences(case: Case, lengths: list[int]) -> tuple[Any, ...]:
    """Make sequences of random tokens in groups of eight, with advantages of both signs."""
    import numpy as np

    from hpc_grpo.types import TrainSequence

    random, vocab_size = np.random.default_rng(1), SHAPES[case.size].vocab_size
    made = []
    for index, length in enumerate(lengths):
        is_trained = np.arange(length) >= case.prompt_tokens
        tokens = random.integers(0, vocab_size, length).astype(np.int32)
        if case.shares_prompts and index % GROUP:
            tokens[: case.prompt_tokens] = made[-1].token_ids[: case.prompt_tokens]
        advantages = is_trained * np.float32(random.normal())
        logprobs = -np.log(vocab_size) * is_trained.astype(np.float32)
        made.append(TrainSequence(index // GROUP, index % GROUP, tokens, is_trained, advantages, logprobs))
    return tuple(made)


def model_flops(case: Case, lengths: list[int]) -> float:
    """Count forward and backward without what is computed twice: 6 a parameter and token, the output layer at trained
    tokens alone, and 6 a L^2 a layer of causal attention over L tokens (Chowdhery et al. 2022, appendix B, halved).
    """
    shape = SHAPES[case.size]
    layers = shape.num_layers * shape.num_layer_parameters * sum(lengths)
    head = shape.vocab_size * shape.hidden_size * sum(length - case.prompt_tokens for length in lengths)
    attention = shape.num_layers * shape.attention_size * sum(length**2 for length in lengths)
    return 6.0 * (layers + head + attention)
