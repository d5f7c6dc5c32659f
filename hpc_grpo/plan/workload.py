"""Sequences and tokens of a step, as upper bounds: nobody knows before sampling how long completions get."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from hpc_grpo.config.resources import engines_per_node
from hpc_grpo.plan.fit import Plan


@dataclass(frozen=True)
class Workload:
    """`max_tokens` and `max_new_tokens` are those of a step whose every sequence is as long as it may be; None: SFT.

    `running_sequences` is what one engine decodes at once then; `num_microbatches` what one learner trains on.
    """

    num_sequences: int
    max_tokens: int | None
    max_new_tokens: int | None
    sequences_per_engine: int
    running_sequences: int
    num_microbatches: int | None


def workload(plan: Plan) -> Workload:
    config = plan.config
    if not config.needs.rollouts or plan.kv_cache is None:
        return Workload(config.sft.batch_size, None, None, 0, 0, None)
    sequences = config.rollout.prompts_per_step * config.rollout.group_size
    engines = plan.num_nodes * engines_per_node(config)
    per_microbatch = max(1, config.train.max_tokens_per_microbatch // config.max_model_len)
    return Workload(
        num_sequences=sequences,
        max_tokens=sequences * config.max_model_len,
        max_new_tokens=sequences * config.rollout.max_new_tokens,
        sequences_per_engine=ceil(sequences / engines),
        running_sequences=min(config.engine.max_num_seqs, plan.kv_cache.num_sequences),
        num_microbatches=ceil(ceil(sequences / plan.num_learners) / per_microbatch),
    )
