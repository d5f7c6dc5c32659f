from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hpc_grpo.learner.learner import Learner


def model(batch: Any) -> tuple[torch.Tensor, None]:
    """Give logprobs that depend on all tokens of a pass, as a GPU's last bits do."""
    return -batch.target_ids.float() - 1e-3 * len(batch.input_ids), None


def test_what_a_completion_scores_does_not_depend_on_what_else_is_scored() -> None:
    learner = Learner.__new__(Learner)
    learner.device, learner.ds_engine = torch.device("cpu"), SimpleNamespace(module=model)
    alone, beside = (learner.score((5, 6), others)[0] for others in ([(7, 8)], [(7, 8), (9,)]))
    assert alone.tolist() == beside.tolist()
    assert [own.round(2).tolist() for own in learner.score((5, 6), [(7, 8), (9,)])] == [[-7.0, -8.0], [-9.0]]
