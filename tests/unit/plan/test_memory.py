"""Bytes a parameter and a token: by hand, against what autograd keeps, against what a DeepSpeed learner holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_grpo.config import Config
from hpc_grpo.config.resources import Budget
from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.learner.model import PolicyModel, load_policy
from hpc_grpo.learner.packing import PackedBatch, pack
from hpc_grpo.learner.split import split_microbatches
from hpc_grpo.plan.budgets import activation_parts
from hpc_grpo.plan.memory import (
    STATES,
    activations,
    layer_bytes_per_token,
    pinned_rounding_bytes,
)
from hpc_grpo.plan.model import FAMILY, Model, read_model
from hpc_grpo.types import DTYPE_BYTES
from tests.support.sequences import ordinary_sequence
from tests.unit.plan.plan_configs import planned_config


def test_page_locked_arrays_are_rounded_to_powers_of_two() -> None:
    assert pinned_rounding_bytes([1 << 30, (1 << 30) + 1, 0]) == (1 << 30) - 1


def test_activations_of_7b_by_hand() -> None:
    shape = FAMILY["7B"]
    # 16 x 3584 + 2 x (3 x 3584 + 2 x 512) + 4 x 28 + 8 x 18944
    assert layer_bytes_per_token(shape, 2) == 57_344 + 23_552 + 112 + 151_552
    peak = activations(shape, 2, 16_384, 1024, is_checkpointed=True)
    assert peak.kept == 28 * 16_384 * 2 * 3584
    assert peak.one_layer == 16_384 * (232_560 + 4 * 18_944)
    assert peak.head == 20 * 1024 * 152_064 + 4 * 152_064 * 3584
    assert peak.working == max(peak.one_layer, peak.head)
    kept = activations(shape, 2, 16_384, 1024, is_checkpointed=False).kept
    assert kept == 28 * 16_384 * 232_560


def test_a_microbatch_shorter_than_a_chunk_has_fewer_logits() -> None:
    short = activations(FAMILY["7B"], 2, 100, 1024, is_checkpointed=True)
    assert short.head == 20 * 100 * 152_064 + 4 * 152_064 * 3584


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Model, Config]:
    size = ModelSize(hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=512)
    write_model(tmp_path, size, seed=0)
    config = planned_config(
        model={"path": str(tmp_path), "device": "cpu"},
        data={"max_prompt_tokens": 16},
        rollout={"max_new_tokens": 32},
    )
    return read_model(str(tmp_path), {}), config


def bytes_kept(policy: PolicyModel, batch: PackedBatch) -> int:
    """Count what autograd keeps for the backward pass, parameters aside."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = policy(batch)
    total = sum(storage.nbytes() for storage in kept.values())
    del outputs
    return total


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_autograd_keeps_what_the_formula_says(tiny: tuple[Model, Config], dtype: str) -> None:
    model, config = tiny
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    num_tokens = 512
    tokens = np.arange(num_tokens // 2, dtype=np.int32) % 200 + 2
    batch = pack([ordinary_sequence(index, 0, tokens, 8) for index in range(2)])
    measured = bytes_kept(load_policy(config, use_gradient_checkpointing=False), batch)
    reckoned = activations(model.shape, DTYPE_BYTES[dtype], num_tokens, 1024, is_checkpointed=False)
    assert measured == pytest.approx(reckoned.kept, rel=0.1)


def test_keys_of_shared_prompts_stay_below_what_is_reckoned(tiny: tuple[Model, Config]) -> None:
    """Sixteen short completions of a long prompt, as many as a budget of their tokens takes."""
    model, config = tiny
    prompt = np.arange(200, dtype=np.int32) % 200 + 2
    sequences = [ordinary_sequence(0, sample, [*prompt, *[sample + 2] * 40], 40) for sample in range(16)]
    [group] = split_microbatches(sequences, Budget(960, shares_prompts=True))
    policy = load_policy(config, use_gradient_checkpointing=False)
    shared, unshared = (pack(group, shares_prompts=shares) for shares in (True, False))
    assert (len(shared.input_ids), len(unshared.input_ids)) == (840, 3840)
    train = {"max_tokens_per_microbatch": 960, "share_prompts": True, "gradient_checkpointing": False}
    planned = config.model_copy(update={"train": config.train.model_copy(update=train)})
    reckoned = {part.name: part.num_bytes for part in activation_parts(model, planned, on_gpu=False)}
    measured = bytes_kept(policy, shared)
    without_keys = activations(model.shape, 2, 840, 1024, is_checkpointed=False).kept
    assert without_keys < measured < reckoned["activations kept"] + reckoned["keys of shared prompts, masks"]
    assert measured < bytes_kept(policy, unshared)


def test_on_a_gpu_keys_of_shared_prompts_are_those_of_all_heads(tiny: tuple[Model, Config]) -> None:
    """Its kernel with a mask takes no grouped heads, so that the tokens' own keys are repeated beside the prompts'."""
    model, config = tiny
    planned = config.model_copy(update={"train": config.train.model_copy(update={"share_prompts": True})})
    tokens, bytes_of_one = planned.train.max_tokens_per_microbatch, DTYPE_BYTES[planned.model.dtype]
    masks = bytes_of_one * tokens * planned.max_model_len
    (part,) = [each for each in activation_parts(model, planned, on_gpu=True) if each.name.startswith("keys of")]
    assert part.num_bytes == 8 * bytes_of_one * model.shape.attention_size * tokens + masks  # checkpointed: one layer


KINDS = [("bfloat16", 2, "none"), ("bfloat16", 3, "cpu")]
PROGRAM = """
import gc, json, sys
import numpy as np, torch
from hpc_grpo.learner.learner import Learner
from hpc_grpo.types import Minibatch
from tests.support.configs import minimal_config
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
    config = minimal_config(
        model={"path": model, "dtype": dtype, "device": "cpu"},
        data={"max_prompt_tokens": 16},
        rollout={"max_new_tokens": 32},
        train={"zero_stage": stage, "offload_optimizer": offload, "max_tokens_per_microbatch": 48},
    )
    learner = Learner(config)
    kept.append(learner)
    tokens = np.arange(2, 42, dtype=np.int32)
    step = Minibatch(tuple(ordinary_sequence(i, 0, tokens, 8) for i in range(4)), 32, 4)
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
