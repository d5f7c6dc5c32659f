"""How far engine and learner disagree, at the tokens of some completions of a step, trained on or not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpc_grpo.algorithms.terms import kl_k3
from hpc_grpo.learner.model import PolicyModel, score
from hpc_grpo.learner.packing import PackedBatch
from hpc_grpo.metrics.reductions import Max, Mean, Reduction


def mismatch(model: PolicyModel, batches: Sequence[PackedBatch]) -> dict[str, Reduction]:
    """Compare the logprobs of engine and learner; no metrics from a rank without tokens. A collective under ZeRO-3.

    `mismatch/kl` estimates KL(engine || learner) from tokens that the engine sampled.
    """
    is_sampled = torch.cat([batch.mask for batch in batches]) > 0.0
    learner = torch.cat([score(model, batch) for batch in batches])[is_sampled]
    engine = torch.cat([batch.engine_logprobs for batch in batches])[is_sampled]
    count = len(learner)
    if not count:
        return {}
    difference = (learner - engine).abs()
    return {
        "mismatch/logprob_abs_diff_mean": Mean(float(difference.sum()), count),
        "mismatch/logprob_abs_diff_max": Max(float(difference.max())),
        "mismatch/kl": Mean(float(kl_k3(engine, learner).sum()), count),
    }
