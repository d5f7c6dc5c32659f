"""Writes the policy in Hugging Face format, for `from_pretrained` and vLLM: a collective, in which rank 0 writes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from hpc_grpo.config import Config
from hpc_grpo.data.tokenizer import model_folder
from hpc_grpo.learner.model import PolicyModel, gathered
from hpc_grpo.run.files import publish_dir, staging_path, start_staging
from hpc_grpo.types import ParameterSpec
from hpc_grpo.weights.buckets import bucket_layout

if TYPE_CHECKING:
    from hpc_grpo.learner.learner import Learner

_BUCKET_BYTES = 256 << 20
"""Bytes of parameters gathered at once under ZeRO-3."""
_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)


def export_model(learner: Learner, directory: Path) -> None:
    """Write `directory` atomically. Tied weights are stored once; `from_pretrained` ties them again."""
    weights = whole_weights(learner.model, learner.parameter_specs())
    if learner.rank == 0:
        staging = start_staging(directory)
        learner.model.language_model.save_pretrained(staging, state_dict=weights)
        copy_tokenizer(learner.config, staging)
    del weights
    for part in learner.parts:
        part.export(staging_path(directory))
    if learner.rank == 0:
        publish_dir(directory)
    dist.barrier()


def whole_weights(model: PolicyModel, specs: Sequence[ParameterSpec]) -> dict[str, Tensor]:
    """Return copies of the parameters in rank 0's host memory, and nothing elsewhere; a collective under ZeRO-3."""
    weights: dict[str, Tensor] = {}
    for bucket in bucket_layout(specs, _BUCKET_BYTES).buckets:
        with gathered(model, bucket.names) as parameters:
            if dist.get_rank() == 0:
                weights.update({name: tensor.cpu().clone() for name, tensor in parameters.items()})
    return weights


def copy_tokenizer(config: Config, folder: Path) -> None:
    """Copy the tokenizer's files: loaded and saved by its class, they may become something else."""
    source = model_folder(config.model.path)
    for file in {file for pattern in _TOKENIZER_FILES for file in source.glob(pattern)}:
        shutil.copyfile(file, folder / file.name)
