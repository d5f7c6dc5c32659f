"""DeepSpeed's conversion of a checkpoint for another number of ranks, reading tensors and plain data alone.

A program of its own, since the conversion forks workers. It takes what `deepspeed.checkpoint.ds_to_universal` takes,
whose every read would run a planted pickle.
"""

from __future__ import annotations

import os
import runpy

import torch

from hpc_grpo.learner.staging import deepspeed_globals

if __name__ == "__main__":
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # torch heeds it whatever its caller says
    torch.serialization.add_safe_globals(deepspeed_globals())
    runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")
