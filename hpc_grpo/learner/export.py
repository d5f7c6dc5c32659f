"""Writes the policy in Hugging Face format, for `from_pretrained` and vLLM: a collective, in which rank 0 writes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from hpc_grpo.data.tokenizer import model_folder
from hpc_grpo.run.files import publish_dir, start_staging
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
    weights: dict[str, Tensor] = {}
    for bucket in bucket_layout(learner.parameter_specs(), _BUCKET_BYTES).buckets:
        with learner.gathered(bucket.names) as parameters:
            if learner.rank == 0:
                weights.update({name: tensor.cpu().clone() for name, tensor in parameters.items()})
    if learner.rank == 0:
        staging = start_staging(directory)
        learner.model.language_model.save_pretrained(staging, state_dict=weights)
        # Copied, not loaded and saved: a tokenizer class may rebuild the files as something else.
        source = model_folder(learner.config.model.path)
        for file in {file for pattern in _TOKENIZER_FILES for file in source.glob(pattern)}:
            shutil.copyfile(file, staging / file.name)
        publish_dir(directory)
    dist.barrier()
