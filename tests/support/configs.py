"""The least config that loads, for tests that need one."""

from __future__ import annotations

from typing import Any

from hpc_grpo.config import Config

_LENGTHS = {"total_steps", "total_episodes", "total_epochs"}


def minimal_config(**sections: Any) -> Config:
    """A run of one step on `d.jsonl` with the model `m`; `sections` win over that, key by key.

    >>> minimal_config(train={"total_epochs": 2}, task="sft").train.total_steps is None
    True
    """
    values: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": "m"},
        "data": {"train": {"path": "d.jsonl"}},
        "train": {"total_steps": 1},
    }
    if _LENGTHS & set(sections.get("train", {})):
        values["train"] = {}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return Config.model_validate(values)
