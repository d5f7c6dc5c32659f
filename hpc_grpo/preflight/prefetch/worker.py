"""A process that fetches or verifies: `python -m hpc_grpo.preflight.prefetch.worker fetch|verify KEY...`.

Reads the resolved config (YAML) on stdin; prints one JSON object per item as soon as it is done: `key`, and `error`
(null if there was none); `verify` adds `folder` and `num_bytes`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.preflight.prefetch.items import Item, items_of
from hpc_grpo.preflight.prefetch.problems import problem


def main(action: str, keys: list[str]) -> None:
    config = Config.model_validate(yaml.safe_load(sys.stdin))
    work = _verified if action == "verify" else _fetched
    if action == "verify":
        from hpc_grpo.preflight.prefetch.verify import shut_off_network

        shut_off_network()
    for item in items_of(config, Path.cwd()):
        if item.key in keys:
            print(json.dumps({"key": item.key, "error": None, **work(config, item)}), flush=True)


def _fetched(config: Config, item: Item) -> dict[str, Any]:
    from hpc_grpo.preflight.prefetch.fetch import fetch

    try:
        fetch(config, item)
    except Exception as error:  # noqa: BLE001 - the libraries raise what their HTTP clients do; told in words
        return {"error": problem(item, error)}
    return {}


def _verified(config: Config, item: Item) -> dict[str, Any]:
    from hpc_grpo.preflight.prefetch.verify import verify

    try:
        return asdict(verify(config, item))
    except (ConfigError, OSError) as error:
        return {"error": f"{item} cannot be loaded with the network off: {' '.join(str(error).split())}"}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
