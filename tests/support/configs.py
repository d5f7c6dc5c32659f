"""The least config that loads, for tests that need one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_grpo.config import Config

_LENGTHS = {"total_steps", "total_episodes", "total_epochs"}
_LEAST: dict[str, Any] = {
    "run": {"name": "test"},
    "model": {"path": "m"},
    "data": {"train": {"path": "d.jsonl"}},
    "train": {"total_steps": 1},
}


def loss_of(**keys: Any) -> Any:
    """Make section `loss` with these keys.

    >>> loss_of(name="dapo").clip_high
    0.28
    """
    return minimal_config(loss=keys).loss


def minimal_config(defaults: Mapping[str, Any] | None = None, /, **sections: Any) -> Config:
    """Make a run of one step on `d.jsonl` with the model `m`; `sections` win over that and `defaults`, key by key.

    >>> minimal_config(train={"total_epochs": 2}, task="sft").train.total_steps is None
    True
    >>> minimal_config({"rollout": {"group_size": 4, "top_p": 0.5}}, rollout={"top_p": 1.0}).rollout.group_size
    4
    """
    values = dict(_LEAST)
    for layer in (defaults or {}, sections):
        if _LENGTHS & set(layer.get("train", {})):
            values["train"] = {key: value for key, value in values["train"].items() if key not in _LENGTHS}
        for name, section in layer.items():
            values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return Config.model_validate(values)
