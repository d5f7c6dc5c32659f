"""Sections `model` and `data`: what is trained, and the prompts, answers and text around them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from hpc_grpo.config.section import PathText, Section


class ModelConfig(Section):
    path: PathText = Field(description="Hugging Face model: a folder, or a name in the local cache.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Precision of the forward pass, of the engines and of the published weights."
    )
    head_dtype: Literal["float32", "model"] = Field(
        "float32",
        description="Precision of the output layer, in learners and engines alike; model: that of dtype, whose rounded "
        "logits give the two different logprobs.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where torch sees a GPU.")


class DatasetConfig(Section):
    path: PathText = Field(description="A .jsonl or .json file, a folder of a saved data set, or a Hugging Face name.")
    split: str = Field("train", description="Split of a Hugging Face data set.")
    subset: str | None = Field(None, description="Configuration name of a Hugging Face data set (GSM8K: main).")
    prompt_field: str = Field("question", description="Column with the prompt text.")
    answer_field: str | None = Field("answer", description="Column with the reference answer; null: none.")
    messages_field: str | None = Field(
        None, description="Column with chat messages; used instead of prompt_field when set."
    )
    max_items: PositiveInt | None = Field(None, description="Use only the first so many items.")


class DataConfig(Section):
    train: DatasetConfig
    eval: DatasetConfig | None = Field(None, description="Held-out data set for eval.")
    template: Literal["chat", "plain"] = Field(
        "chat", description="chat: the tokenizer's chat template; plain: prompt_format alone."
    )
    prompt_format: str = Field("{prompt}", description="Text around a plain prompt; {prompt} is replaced.")
    system_prompt: str | None = Field(None, description="System message put before a chat prompt.")
    max_prompt_tokens: PositiveInt = Field(512, description="A longer prompt is an error, or is dropped.")
    drop_long_prompts: bool = Field(False, description="Drop (and count) prompts that are too long.")
    shuffle: bool = Field(True, description="Shuffle every epoch, as a function of the seed and the epoch.")
