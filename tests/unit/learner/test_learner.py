from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.learner import check_sequences, mismatch, score_apart
from hpc_grpo.learner.packing import pack, zero_weight_batch
from hpc_grpo.metrics.reductions import merge
from tests.support.configs import minimal_config
from tests.support.sequences import ordinary_sequence


def model(batch: Any, **_: bool) -> tuple[torch.Tensor, None]:
    """Give logprobs that depend on all tokens of a pass, as a GPU's last bits do."""
    return -batch.target_ids.float() - 1e-3 * len(batch.input_ids), None


def test_what_a_completion_scores_does_not_depend_on_what_else_is_scored() -> None:
    policy: Any = model
    alone, beside = (score_apart(policy, (5, 6), others, "cpu") for others in ([(7, 8)], [(7, 8), (9,)]))
    assert alone[0].tolist() == beside[0].tolist()
    assert [own.round(2).tolist() for own in beside] == [[-7.0, -8.0], [-9.0]]


def test_versions_that_an_algorithm_of_the_users_left_out_are_not_interpolated() -> None:
    sequences, settings, config = [ordinary_sequence(0, 0, [1, 2, 3], 2)], SimpleNamespace(), minimal_config()
    with pytest.raises(
        ConfigError,
        match=r"of task = grpo have none\. Fill TrainSequence\.policy_versions \[L\] where the task.s class overrides",
    ):
        check_sequences(sequences, settings, "interpolated", config)
    check_sequences(sequences, settings, "recomputed", config)


def test_experts_that_an_algorithm_of_the_users_left_out_are_not_replayed() -> None:
    sequences, config = [ordinary_sequence(0, 0, [1, 2, 3], 2)], minimal_config(train={"router_replay": True})
    with pytest.raises(ConfigError, match=r"of task = grpo have none\. Fill TrainSequence\.experts \[L, layers, k\]"):
        check_sequences(sequences, SimpleNamespace(), "recomputed", config)


def test_each_token_that_an_engine_sampled_counts_and_filling_does_not() -> None:
    policy: Any = lambda batch, **_: (torch.zeros(len(batch.target_ids)), None)  # noqa: E731
    batch = replace(pack([ordinary_sequence(0, 0, [5, 6, 7], 2)]), engine_logprobs=torch.tensor([-1.0, 0.0]))
    assert merge([mismatch(policy, [batch, zero_weight_batch()])]) == {
        "mismatch/logprob_abs_diff_mean": 0.5,
        "mismatch/logprob_abs_diff_max": 1.0,
        "mismatch/kl": pytest.approx((math.e - 2.0) / 2),
    }
    assert mismatch(policy, [zero_weight_batch()]) == {}
