"""DeepSpeed's conversion of a checkpoint for another number of ranks, reading tensors and plain data alone.

A program of its own, since the conversion starts workers, which import it too. It takes what
`deepspeed.checkpoint.ds_to_universal` takes, whose every read would run a planted pickle.
"""

from __future__ import annotations

import os

import torch
from deepspeed.checkpoint import ds_to_universal

from hpc_grpo.learner.staging import deepspeed_globals

os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # torch heeds it whatever its caller says
torch.serialization.add_safe_globals(deepspeed_globals())

if __name__ == "__main__":
    ds_to_universal.main(ds_to_universal.parse_arguments())
