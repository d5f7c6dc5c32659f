"""The command of a job on its VM, built as a list of words from the job's row. Pure functions; no shell reads the
words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_grpo.config.load import overridden, read_layers, shipped_config, to_yaml
from hpc_grpo.config.yaml_text import read_value
from hpc_grpo.errors import ConfigError
from hpc_grpo.fleet.attempt_folder import CONFIG_FILE
from hpc_grpo.fleet.messages import AttemptKey, file_name
from hpc_grpo.fleet.settings import FleetSettings
from hpc_grpo.system.secret import secret_keys

_TRAIN_GRPO = ("model", "dataset", "reward_function", "max_steps", "preprocessing")
"""Columns that are options of train_grpo.py."""


def make_spec(job: Mapping[str, Any], gpus: tuple[int, ...], settings: FleetSettings) -> dict[str, Any]:
    """Return an attempt's spec for the runner. Raises ConfigError for a row that no VM could run."""
    key = AttemptKey(job["job_id"], job["attempt"])
    overrides = _overrides_of(job)
    _refuse_several_nodes(job, overrides)
    if job["config"] or job["config_name"]:
        words = ["train", CONFIG_FILE if job["config"] else job["config_name"]]
    elif not job["model"]:
        raise ConfigError("The job has neither a config nor a model. Give it one of the two.")
    elif missing := [name for name in ("dataset", "reward_function") if not job[name]]:
        raise ConfigError(f"A job with a model needs {missing[0]} too: train_grpo.py has no default for it.")
    else:  # Each option and its value are one word, so that no value is read as an option.
        words = ["grpo", *(f"--{name}={job[name]}" for name in _TRAIN_GRPO if job[name])]
        words += ["--use_unsloth"] if job["use_unsloth"] else []
    return {
        **key._asdict(),
        "gpus": list(gpus),
        "program": list(settings.program),
        "words": [*words, *overrides],
        "config": job["config"],
        "output_dir": job["output_dir"],
        "run": {"name": file_name(key.job_id), **_run_of(job["config"], overrides)},
        "env": settings.env,
        "lease_s": settings.lease_s,
        "end_s": settings.end_s,
    }


def config_text(path: Path) -> str:
    """Return the text of a config file for a job, merged over its base files."""
    text = path.read_text()
    values = read_value(text, "config")
    return to_yaml(read_layers(path)) if isinstance(values, dict) and "base" in values else text


def secrets_of(job: Mapping[str, Any]) -> list[str]:
    """Return the keys of a job's config, overrides and other texts that hold a secret."""
    pairs = [override.partition("=")[::2] for override in _overrides_of(job)]
    found = [each for key, value in pairs for each in secret_keys(read_value(value, key), key, key.rpartition(".")[2])]
    texts = {name: value for name, value in job.items() if name not in ("config", "overrides", "job_id")}
    return [*secret_keys(read_value(job["config"], "config")), *found, *secret_keys(texts)]


def _overrides_of(job: Mapping[str, Any]) -> list[str]:
    try:
        values = json.loads(job["overrides"] or "[]")
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(
        isinstance(value, str) and "=" in value and not value.startswith("-") for value in values
    ):
        raise ConfigError(f"overrides = {job['overrides']!r} must be a JSON list of KEY=VALUE texts.")
    return values


def _run_of(config: str, overrides: list[str]) -> dict[str, str]:
    """Return `name` and `root` of the job's run if its config or overrides set them.

    A name in the config alone does not count: all jobs of the config would share a folder below the VM's `runs`.
    """
    values = read_value(config, "config")
    run = values.get("run") if isinstance(values, dict) else None
    found = {key: str(run[key]) for key in ("name", "root") if isinstance(run, dict) and run.get(key)}
    pairs = dict(override.partition("=")[::2] for override in overrides)
    given = {key: f"run.{key}" for key in ("name", "root") if f"run.{key}" in pairs}
    found |= {key: str(read_value(pairs[override], override)) for key, override in given.items()}
    if "root" not in found and "run.name" not in pairs:
        found.pop("name", None)
    return found


def _refuse_several_nodes(job: Mapping[str, Any], overrides: list[str]) -> None:
    """Raise ConfigError for a job of several nodes: a job's GPUs are on one VM.

    Files on the VM that the job names, or builds on, are not checked here.
    """
    values = read_value(job["config"], "config")
    if not job["config"] and (shipped := shipped_config(job["config_name"])) is not None:
        values = read_layers(shipped)
    of_launch = [override for override in overrides if re.match(r"launch[.=]", override)]
    launch = overridden(values if isinstance(values, dict) else {}, of_launch).get("launch")
    launch = launch if isinstance(launch, dict) else {}
    nodes, hosts = launch.get("num_nodes", 1), launch.get("hosts")
    if str(nodes) != "1" or hosts:
        rule = f"launch.hosts = {hosts!r} must be empty" if hosts else f"launch.num_nodes = {nodes!r} must be 1"
        raise ConfigError(
            f"{rule} in a job of the fleet, whose GPUs are all of one VM: give launch.num_nodes=1 launch.hosts=[], "
            f"and ask for more GPUs with --gpus."
        )
