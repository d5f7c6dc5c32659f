"""Which keys of its config a run that has trained may be resumed with anew, and in which two configs differ."""

from __future__ import annotations

import re
from typing import Any

from hpc_grpo.config import Config

CHANGEABLE: dict[str, str] = {
    "train.total_steps": "extends or shortens the run",
    "train.total_episodes": "extends or shortens the run",
    "train.total_epochs": "extends or shortens the run",
    "train.max_tokens_per_microbatch": "how the same sums are cut, not what is summed",
    "train.logprob_chunk_tokens": "how the same logits are cut",
    "train.gradient_checkpointing": "computes again what it does not keep",
    "train.attention": "another kernel of the same attention",
    "train.num_threads": "how fast, not what",
    "rollout.logged_fraction": "what is written down, not what is trained on",
    "rewards.*.timeout_s": "how long to wait for the same reward",
    "grading.": "how failures of rewards are borne, and how many processes grade",
    "checkpoint.": "when state is saved, not what it is",
    "metrics.": "where numbers are sent",
    "launch.": "another partition, time or number of nodes carries on the same run",
    "placement.": "a checkpoint is rewritten for another number of learners",
    "eval.": "looks at the policy without changing it",
    "weights.": "how the same bytes travel",
    "deadlines.": "when to give up, not what to do",
    "engine.": "how the same policy is sampled from; fits another kind of node",
}
"""Keys that may differ on resume, and why. A trailing dot: all keys of a section; `*`: any position in a list.

Not the learning rate: the scheduler's state in a checkpoint has it, so another one would be ignored in silence.
"""


def may_change(key: str) -> bool:
    return any(re.fullmatch(_pattern(entry), key) for entry in CHANGEABLE)


def differences(before: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ -> (before, now); items of a list of sections are keys such as rewards.0.name."""
    old, new = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    return {key: (old.get(key), new.get(key)) for key in sorted({*old, *new}) if old.get(key) != new.get(key)}


def _pattern(entry: str) -> str:
    return re.escape(entry).replace(r"\*", "[0-9]+") + (".+" if entry.endswith(".") else "")


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, list) and any(isinstance(part, dict) for part in item):
            item = {str(position): part for position, part in enumerate(item)}
        if isinstance(item, dict) and item:
            flat.update(_flat(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = item
    return flat
