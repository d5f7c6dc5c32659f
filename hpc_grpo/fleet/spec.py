"""What a job is to its VM: the words of a command, made from the job's row. Pure functions; no shell reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_grpo.config.load import overridden, read_layers, shipped_config, to_yaml
from hpc_grpo.errors import ConfigError
from hpc_grpo.fleet.attempt_folder import CONFIG_FILE
from hpc_grpo.fleet.messages import AttemptKey, file_name
from hpc_grpo.fleet.settings import FleetSettings
from hpc_grpo.system.secret import secret_keys


def make_spec(job: Mapping[str, Any], gpus: tuple[int, ...], settings: FleetSettings) -> dict[str, Any]:
    """Return what the runner is told of an attempt. Raises ConfigError for a row that says nothing to run."""
    key = AttemptKey(job["job_id"], job["attempt"])
    _expect_one_node(job)
    return {
        **key._asdict(),
        "gpus": list(gpus),
        "program": list(settings.program),
        "words": _words(job),
        "config": job["config"],
        "output_dir": job["output_dir"],
        "run": {"name": file_name(key.job_id), **run_of(job["config"], overrides_of(job))},
        "env": settings.env,
        "lease_s": settings.lease_s,
        "end_s": settings.end_s,
    }


def config_text(path: Path) -> str:
    """Return what a job is given of a config's file: its text, merged over the files that it builds on."""
    text = path.read_text()
    values = _yaml(text, "config")
    return to_yaml(read_layers(path)) if isinstance(values, dict) and "base" in values else text


def overrides_of(job: Mapping[str, Any]) -> list[str]:
    """Read the overrides of a row. Raises ConfigError where they are no list of KEY=VALUE."""
    try:
        values = json.loads(job["overrides"] or "[]")
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(map(_is_override, values)):
        raise ConfigError(f"overrides = {job['overrides']!r} must be a JSON list of KEY=VALUE texts.")
    return values


def secrets_of(job: Mapping[str, Any]) -> list[str]:
    """Return the keys of a job's config, overrides and other texts that hold a secret."""
    given = [override.partition("=")[::2] for override in overrides_of(job)]
    found = [each for key, value in given for each in secret_keys(_yaml(value, key), key, key.rpartition(".")[2])]
    texts = {name: value for name, value in job.items() if name not in ("config", "overrides", "job_id")}
    return [*secret_keys(_yaml(job["config"], "config")), *found, *secret_keys(texts)]


def _is_override(value: object) -> bool:
    return isinstance(value, str) and "=" in value and not value.startswith("-")


def run_of(config: str, overrides: list[str]) -> dict[str, str]:
    """Return `name` and `root` of the job's run where its config or overrides say them.

    A config's name alone does not count: the jobs of one config would share a folder below the VM's `runs`.
    """
    values = _yaml(config, "config")
    run = values.get("run") if isinstance(values, dict) else None
    found = {key: str(run[key]) for key in ("name", "root") if isinstance(run, dict) and run.get(key)}
    told = [override.partition("=")[::2] for override in overrides]
    for name, value in told:
        if name in ("run.name", "run.root"):
            found[name.removeprefix("run.")] = str(_yaml(value, name))
    if "root" not in found and "run.name" not in dict(told):
        found.pop("name", None)
    return found


def _expect_one_node(job: Mapping[str, Any]) -> None:
    """Check that the job asks for one node, as far as is known here. Raises ConfigError: a job's GPUs are of one VM.

    Not known is what a VM's own file says that the job names, or builds on.
    """
    values = _yaml(job["config"], "config")
    if not job["config"] and (shipped := shipped_config(job["config_name"])) is not None:
        values = read_layers(shipped)
    told = [override for override in overrides_of(job) if re.match(r"launch[.=]", override)]
    launch = overridden(values if isinstance(values, dict) else {}, told).get("launch")
    asked = launch if isinstance(launch, dict) else {}
    nodes, hosts = asked.get("num_nodes", 1), asked.get("hosts")
    if str(nodes) != "1" or hosts:
        rule = f"launch.hosts = {hosts!r} must be empty" if hosts else f"launch.num_nodes = {nodes!r} must be 1"
        raise ConfigError(
            f"{rule} in a job of the fleet, whose GPUs are all of one VM: give launch.num_nodes=1 launch.hosts=[], "
            f"and ask for more GPUs with --gpus."
        )


def _yaml(text: str, what: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"The job's {what} is no YAML: {error}") from error


def _words(job: Mapping[str, Any]) -> list[str]:
    if job["config"] or job["config_name"]:
        return ["train", CONFIG_FILE if job["config"] else job["config_name"], *overrides_of(job)]
    if not job["model"]:
        raise ConfigError("The job has neither a config nor a model: nothing to run.")
    if missing := [name for name in ("dataset", "reward_function") if not job[name]]:
        raise ConfigError(f"{missing[0]} must say something where a job has a model: train_grpo.py needs it.")
    return ["grpo", *train_grpo_words(job), *overrides_of(job)]


def train_grpo_words(job: Mapping[str, Any]) -> list[str]:
    """Return the arguments of train_grpo.py: each value in one word with its option, so that none becomes another."""
    names = ("model", "dataset", "reward_function", "max_steps", "preprocessing")
    return [f"--{name}={job[name]}" for name in names if job[name]] + (["--use_unsloth"] if job["use_unsloth"] else [])
