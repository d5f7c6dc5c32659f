"""What the user asked for: a CONFIG argument (YAML or .sh) and overrides, resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_grpo.config import Config, load_config
from hpc_grpo.config.load import find_config
from hpc_grpo.config.shell_file import read_shell_config


@dataclass(frozen=True)
class Request:
    """A resolved config, the overrides that led to it, and variables that a .sh config exported."""

    config: Config
    overrides: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def load_request(config_name: str, overrides: Sequence[str]) -> Request:
    """Load CONFIG with `overrides` (which win over those in a .sh). Raises ConfigError."""
    if not config_name.endswith(".sh"):
        return Request(load_config(config_name, overrides), list(overrides))
    shell = read_shell_config(find_config(config_name))
    all_overrides = [*shell.overrides, *overrides]
    config = load_config(_beside(shell.config_name, shell.path), all_overrides)
    return Request(shell.with_environment(config), all_overrides, shell.environment)


def _beside(config_name: str, script: Path) -> str:
    """A config named relative to the script that names it, where the working directory has none."""
    beside = script.parent / config_name
    return str(beside) if not Path(config_name).is_file() and beside.is_file() else config_name
