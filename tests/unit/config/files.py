"""Configs in files, for the tests beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_grpo.config import Config, load_config
from hpc_grpo.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "run": {"name": "tiny"},
    "model": {"path": "some/model"},
    "data": {"train": {"path": "train.jsonl"}},
    "train": {"total_steps": 3},
}


def write(path: Path, values: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values))
    return path


def load(path: Path, *overrides: str) -> Config:
    return load_config(str(path), overrides)


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, *overrides)
    return str(caught.value)
