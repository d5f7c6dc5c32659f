"""Options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.contract import DEFAULT_DRIVER

CONFIG = click.argument("config_name", metavar="CONFIG")
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
SET = click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key of the config, such as train.lr=1e-6."
)
DRIVER = click.option("--driver", hidden=True, default=DEFAULT_DRIVER, help="Module or .py file; for tests.")


def slurm_time(value: str) -> int:
    """The type of a --time option: a walltime as Slurm's own takes it, in minutes. Raises ConfigError."""
    from hpc_grpo.launch.place.slurm.text import minutes

    if time_min := minutes(value):
        return time_min
    raise ConfigError(
        f"--time = {value!r} must be a time in one of Slurm's formats, and more than 0: 90 (minutes), 90:00, 24:00:00, "
        f"1-12 (days-hours), 1-12:30 or 1-12:30:00."
    )


def slurm_overrides(options: Mapping[str, Any]) -> list[str]:
    """Options of a command as overrides of the config; those not given are left out.

    Raises UsageError for two that contradict each other.
    """
    if options.get("chain") is not None and options.get("until_complete"):
        raise click.UsageError(
            "--chain N and --until-complete each say how many follow-on jobs there may be: give one."
        )
    keys = {
        "name": "run.name",
        "nodes": "launch.slurm.num_nodes",
        "time": "launch.slurm.time_min",
        "partition": "launch.slurm.partition",
        "account": "launch.slurm.account",
        "gpus_per_node": "launch.slurm.gpus_per_node",
        "cpus_per_node": "launch.slurm.cpus_per_node",
        "chain": "launch.slurm.max_job_chains",
    }
    words = [f"{key}={json.dumps(options[name])}" for name, key in keys.items() if options.get(name) is not None]
    for pair in options.get("sbatch", ()):
        key, separator, value = pair.partition("=")
        words.append(f"launch.slurm.extra.{key.replace('-', '_')}={json.dumps(value if separator else True)}")
    if options.get("setup"):
        words.append(f"launch.setup_lines+={json.dumps(list(options['setup']))}")
    if options.get("until_complete"):
        words.append("launch.slurm.max_job_chains=null")
    return words
