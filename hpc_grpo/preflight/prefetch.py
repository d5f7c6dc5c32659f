"""`hpc-grpo cluster prefetch`: fill the caches that a job will read, and prove that the job then needs no network.

`items_of` lists the config's model and data sets. `prefetch` has one process fetch them, and another one verify them
with the network off. Both run prefetch_worker.py, with the job's caches in their environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config, LaunchConfig, SourceConfig, to_yaml
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.environment import expand
from hpc_grpo.registry import names_function
from hpc_grpo.system import hugging_face

DATA_FILES = (".jsonl", ".json", ".parquet", ".arrow")
_MADE_HERE = "reasoning_gym:"
_PACKAGES = ("huggingface_hub", "transformers", "datasets")
_OFFLINE = dict.fromkeys(hugging_face.OFFLINE_VARIABLES, "1")
_CACHE_VARIABLES = (
    "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "XDG_CACHE_HOME",
    "HOME",
)  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A model or data set, by its config `key`, such as data.train.mix.0.path. A local one is only verified.

    `source` is the config's section of a data set; None for a model.
    """

    key: str
    name: str
    is_local: bool
    source: SourceConfig | None = None

    def __str__(self) -> str:
        return f"{self.key} = {self.name}"


def items_of(config: Config, working_dir: Path) -> list[Item]:
    """Return the items of a run, the model first, because data are tokenized with it.

    `working_dir` is the run's working folder. A path there named like ORGANISATION/NAME overrides the hub.
    """
    items = []
    for key, path in config.models.items():
        items.append(Item(key, path, hugging_face.is_no_hub_name(path) or is_there(working_dir / path)))
    for key, source in [*config.data.sources(for_eval=False), *config.data.sources(for_eval=True)]:
        path = source.path
        is_path = hugging_face.is_no_hub_name(path) or path.endswith(DATA_FILES) or is_there(working_dir / path)
        items.append(Item(f"{key}.path", path, is_generated(path) or is_path, source))
    return items


def is_there(place: Path) -> bool:
    """Return whether `place` exists. Path.exists would raise below a folder that this user may not enter."""
    return os.path.exists(place)  # noqa: PTH110


def is_generated(path: str) -> bool:
    """Return whether a function or a package makes the data set, so that no file of it exists."""
    return path.startswith(_MADE_HERE) or names_function(path)


def prefetch(config: Config, environ: Mapping[str, str], *, verify_only: bool) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Yield each item in the config, as soon as it is checked, with its `folder` and `num_bytes`, or an `error`.

    An error says why the job would not find the item. Failed downloads come first. Raises ConfigError if a library is
    missing or the job's caches are unknown here.
    """
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"prefetch needs {', '.join(missing)}: install hpc-grpo[train], [cpu] or [gpu] here.")
    online = _fetching_environment(environ, config.launch)
    items = {item.key: item for item in items_of(config, Path.cwd())}
    to_fetch = [] if verify_only else [key for key, item in items.items() if not item.is_local]
    failed = set[str]()
    for result in _work("fetch", config, to_fetch, online):
        if result["error"] is not None:
            failed.add(result["key"])
            yield items[result["key"]], result
    # Without the model nothing is verified: data sets are tokenized with it.
    to_verify = [] if "model.path" in failed else [key for key in items if key not in failed]
    for result in _work("verify", config, to_verify, {**online, **_OFFLINE}):
        yield items[result["key"]], result


def _fetching_environment(environ: Mapping[str, str], launch: LaunchConfig) -> dict[str, str]:
    """Return `environ` with the job's cache folders, and with the network on even if the job is offline.

    Raises ConfigError for a cache folder that is named by a variable which does not exist here.
    """
    caches = {name: expand(value, environ) for name, value in launch.env.items() if name in _CACHE_VARIABLES}
    for name, value in caches.items():
        if "$" in value:
            raise ConfigError(
                f"launch.env.{name} = {launch.env[name]} cannot be resolved here: it names a variable that is not set "
                f"on this machine. Export it as it is in the job, or name a folder that all nodes share."
            )
    # `hf auth login` wrote the token to the shell's Hugging Face home. The job's home may differ.
    token = {"HF_TOKEN_PATH": environ.get("HF_TOKEN_PATH") or str(hugging_face.home(environ) / "token")}
    return {name: value for name, value in {**environ, **caches, **token}.items() if name not in _OFFLINE}


def _work(action: str, config: Config, keys: Sequence[str], environ: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the worker's result for each of `keys`. Raises LaunchError if the worker dies before its last result."""
    if not keys:
        return
    command = [sys.executable, "-m", "hpc_grpo.preflight.prefetch_worker", action, *keys]
    num_results = 0
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(environ)
    ) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(to_yaml(config))
        worker.stdin.close()
        for line in worker.stdout:
            num_results += 1
            yield json.loads(line)
    if num_results < len(keys):
        raise LaunchError(f"The process that was to {action} {keys[num_results]} ended with {worker.returncode}.")
