"""The bytes a parameter of plan/memory.py against the tensors that a DeepSpeed learner really holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.plan.memory import STATES

KINDS = [("bfloat16", 2, "none"), ("bfloat16", 3, "cpu")]

PROGRAM = """
import gc, json, sys
import numpy as np, torch
from hpc_grpo.config import Config
from hpc_grpo.learner.learner import Learner
from hpc_grpo.types import Minibatch
from tests.support.sequences import ordinary_sequence

BUCKETS = 10**9  # communication buffers, allocated in full and never touched

def live_bytes():
    gc.collect()
    found = {}
    for tensor in gc.get_objects():
        if not isinstance(tensor, torch.Tensor):
            continue
        for each in (tensor, tensor.grad if tensor.is_leaf else None):
            if each is not None and each.untyped_storage().nbytes() < BUCKETS:
                found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(found.values())

def measure(model, dtype, stage, offload, kept):
    before = live_bytes()
    config = Config.model_validate({
        "run": {"name": "test"}, "model": {"path": model, "dtype": dtype, "device": "cpu"},
        "data": {"train": {"path": "none"}, "max_prompt_tokens": 16}, "rollout": {"max_new_tokens": 32},
        "train": {"total_steps": 9, "zero_stage": stage, "offload_optimizer": offload, "max_tokens_per_microbatch": 48},
    })
    learner = Learner(config)
    kept.append(learner)
    tokens = np.arange(2, 42, dtype=np.int32)
    step = Minibatch(tuple(ordinary_sequence(i, 0, tokens, 8) for i in range(4)), 32)
    learner.train_step([step])
    finish, seen = learner.ds_engine.step, []
    def before_step():
        seen.append(live_bytes())
        return finish()
    learner.ds_engine.step = before_step
    learner.train_step([step])
    learner.ds_engine.step = finish
    return seen[0] - before

kept = []
print(json.dumps([measure(sys.argv[1], *kind, kept) for kind in json.loads(sys.argv[2])]))
"""


@pytest.mark.long
@pytest.mark.integration
def test_a_learner_holds_as_many_bytes_a_parameter(tmp_path: Path) -> None:
    size = ModelSize(hidden_size=256, num_layers=6, num_heads=8, num_kv_heads=8, intermediate_size=512)
    num_parameters = write_model(tmp_path, size, seed=0)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(KINDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    for (dtype, stage, offload), num_bytes in zip(KINDS, measured, strict=True):
        row = STATES[dtype, stage, offload != "none"]
        on_gpu = row.weights_whole + row.weights_shard + row.gradients_whole + row.gradients_shard + row.optimizer_shard
        on_host = row.host_optimizer_shard + row.host_gradients_shard + row.host_staging_shard
        assert num_bytes / num_parameters == pytest.approx(on_gpu + on_host, rel=0.03), (dtype, stage, offload)
