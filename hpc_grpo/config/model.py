"""Section `model`: which model is trained, in which precision, on which device."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpc_grpo.config.section import Section


class ModelConfig(Section):
    path: str = Field(description="Hugging Face model: a folder, or a name in the local cache.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Precision of the forward pass, of the engines and of the published weights."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where torch sees a GPU.")
