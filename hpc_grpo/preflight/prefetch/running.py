"""Fetching, then verifying, each in a process with the job's caches in its environment."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config, to_yaml
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.preflight.prefetch.caches import fetching_environment, verifying_environment
from hpc_grpo.preflight.prefetch.items import Item, items_of

_PACKAGES = ("huggingface_hub", "transformers", "datasets")


@dataclass(frozen=True)
class Outcome:
    """An item with where it lies, or with the reason why the job would not find it."""

    item: Item
    folder: str = ""
    num_bytes: int = 0
    error: str | None = None


def prefetch(config: Config, environ: Mapping[str, str], *, verify_only: bool) -> Iterator[Outcome]:
    """Yield the outcome of each item the config names, as it is known; those not fetched come first.

    Raises ConfigError when a library is missing or the job's caches cannot be named here.
    """
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"prefetch needs {', '.join(missing)}: install hpc-grpo[train], [cpu] or [gpu] here.")
    fetching = fetching_environment(environ, config.launch)
    items = {item.key: item for item in items_of(config, Path.cwd())}
    named = [] if verify_only else [key for key, item in items.items() if not item.is_local]
    failed = set[str]()
    for told in _work("fetch", config, named, fetching):
        if told["error"] is not None:
            failed.add(told["key"])
            yield Outcome(items[told["key"]], error=told["error"])
    # A data set's first row is tokenized with the model.
    left = [] if "model.path" in failed else [key for key in items if key not in failed]
    for told in _work("verify", config, left, verifying_environment(fetching)):
        yield Outcome(items[told.pop("key")], **told)


def _work(action: str, config: Config, keys: Sequence[str], environ: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """What the worker tells about each of `keys`. Raises LaunchError when it dies before it has told all."""
    if not keys:
        return
    command = [sys.executable, "-m", "hpc_grpo.preflight.prefetch.worker", action, *keys]
    num_told = 0
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(environ)
    ) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(to_yaml(config))
        worker.stdin.close()
        for line in worker.stdout:
            num_told += 1
            yield json.loads(line)
    if num_told < len(keys):
        raise LaunchError(f"The process that was to {action} {keys[num_told]} ended with {worker.returncode}.")
