"""Metrics under the names that another system gives them (`metrics.names`), for W&B, TensorBoard and the log.

AReaL's are those of inclusionAI/AReaL: `areal` has areal/trainer/ppo/actor.py (stats_tracker's scopes `ppo_actor` and
`update`), `areal-0.3` what realhf's master worker logs (docs of version 0.3, "Key Training Statistics").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hpc_grpo.metrics.record import REWARD, StepRecord

NAMES: Mapping[str, Mapping[str, str]] = {
    "areal": {
        REWARD: "ppo_actor/task_reward/avg",
        "policy/ratio_mean": "ppo_actor/update/importance_weight/avg",
        "policy/clip_fraction": "ppo_actor/update/clip_ratio/avg",
        "policy/entropy": "ppo_actor/update/entropy/avg",
        "loss/policy": "ppo_actor/update/actor_loss/avg",
        "grad_norm": "ppo_actor/update/grad_norm",
        "lr": "ppo_actor/update/lr",
        "correction/weight_mean": "ppo_actor/update/behave_imp_weight/avg",
        "tokens/prompt_mean": "ppo_actor/prompt_len/avg",
        "tokens/sequence_mean": "ppo_actor/seq_len/avg",
        "tokens/truncated_fraction": "ppo_actor/no_eos_ratios/avg",
    },
    "areal-0.3": {
        REWARD: "task_reward",
        "policy/ratio_mean": "importance_weight",
        "policy/clip_fraction": "actor_clip_ratio",
        "loss/policy": "actor_loss",
        "tokens/prompt_mean": "avg_prompt_len",
        "tokens/sequence_mean": "avg_seq_len",
        "tokens/truncated_fraction": "no_eos_ratio",
    },
}
"""`metrics.names` -> our name -> theirs."""


def renamed(record: StepRecord, names: str) -> StepRecord:
    """Return the record with the names that are asked for; metrics that have none there keep ours."""
    table = NAMES.get(names, {})
    return replace(record, metrics={table.get(name, name): value for name, value in record.metrics.items()})
