"""A character-level Qwen2 model with random weights, in the folder layout of `from_pretrained` and vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hpc_grpo.errors import ConfigError

PAD, EOS = "<pad>", "<eos>"
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The head sizes of vLLM's attention kernel for CPUs."""


@dataclass(frozen=True)
class ModelSize:
    """The shape of a Qwen2 model. `max_tokens` limits prompt and completion together."""

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 256
    max_tokens: int = 256
    tie_embeddings: bool = True


def write_model(folder: Path, size: ModelSize, seed: int) -> int:
    """Write model and tokenizer; return the number of parameters. Raises ConfigError for heads without a CPU kernel."""
    head_size, rest = divmod(size.hidden_size, size.num_heads)
    if rest or head_size not in _HEAD_SIZES:
        raise ConfigError(
            f"hidden_size = {size.hidden_size} with num_heads = {size.num_heads} gives heads of "
            f"{size.hidden_size / size.num_heads:g}. vLLM on CPU has kernels for "
            f"{', '.join(map(str, _HEAD_SIZES))}: choose another num_heads."
        )
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        intermediate_size=size.intermediate_size,
        max_position_embeddings=size.max_tokens,
        tie_word_embeddings=size.tie_embeddings,
        # The default of 0.02 suits thousands of channels; in narrow layers the outputs would be too small.
        initializer_range=size.hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, so one per ASCII character."""
    # AutoTokenizer loads every qwen2 folder as Qwen2Tokenizer, which builds its own byte-level BPE pipeline from the
    # vocabulary. A byte alphabet without merges means the same in both pipelines.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=EOS, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped
