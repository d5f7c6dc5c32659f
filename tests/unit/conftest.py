"""What unit tests of several areas share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def make_tokenizer() -> Callable[..., Any]:
    """A maker of character-level tokenizers: one token per ASCII character, no download."""
    return character_tokenizer


@pytest.fixture
def chat_template() -> str:
    return CHAT_TEMPLATE


def character_tokenizer(chat_template: str | None = None) -> Any:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    for code in [10, *range(32, 127)]:
        vocabulary[chr(code)] = len(vocabulary)
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = chat_template
    return tokenizer
