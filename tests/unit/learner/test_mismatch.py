from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from hpc_grpo.learner.accumulator import mismatch
from hpc_grpo.learner.packing import pack, zero_weight_batch
from hpc_grpo.metrics.reductions import merge
from tests.support.sequences import ordinary_sequence


def model(batch: Any, **_: bool) -> tuple[torch.Tensor, None]:
    return torch.zeros(len(batch.target_ids)), None


def test_each_token_that_an_engine_sampled_counts_and_filling_does_not() -> None:
    batch = pack([ordinary_sequence(0, 0, [5, 6, 7], 2)])
    batch = replace(batch, engine_logprobs=torch.tensor([-1.0, 0.0]))
    policy: Any = model
    assert merge([mismatch(policy, [batch, zero_weight_batch()])]) == {
        "mismatch/logprob_abs_diff_mean": 0.5,
        "mismatch/logprob_abs_diff_max": 1.0,
        "mismatch/kl": pytest.approx((math.e - 2.0) / 2),
    }
    assert mismatch(policy, [zero_weight_batch()]) == {}
