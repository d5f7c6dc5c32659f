"""Slurm's partitions and accounts with their limits. A job beyond a limit may wait in the queue forever."""

from __future__ import annotations

import getpass
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_grpo.config import LaunchConfig, SlurmConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.place.slurm.text import fields, granted_gpus, minutes
from hpc_grpo.system.commands import Answer, run_command

_DEADLINE_S = 10.0  # short: sbatch gives these answers in any case

OLDEST_SLURM = (22, 5)
"""The oldest tested Slurm, as (year, month): Debian 12's. Since then steps do not inherit --cpus-per-task."""

_NO_CLUSTER = "Could not establish a configuration source"
"""Slurm's message on a machine whose Slurm tools have no cluster."""


@dataclass(frozen=True)
class Partition:
    """A partition, with the fields of `scontrol show partition`."""

    name: str
    fields: Mapping[str, str]

    @property
    def is_default(self) -> bool:
        return self.fields.get("Default") == "YES"

    @property
    def num_nodes(self) -> int:
        return int(self.fields.get("TotalNodes", "0"))

    @property
    def max_nodes(self) -> int:
        limit = self.fields.get("MaxNodes", "")
        return min(self.num_nodes, int(limit)) if limit.isdigit() else self.num_nodes

    @property
    def num_gpus(self) -> int | None:
        """Return the GPUs of all nodes, of which some may have none; None if Slurm does not account for GPUs."""
        total = granted_gpus(self.fields.get("TRES", ""))
        return int(total) if total else None

    @property
    def max_minutes(self) -> int | None:
        """Return the longest walltime; None for no limit."""
        return minutes(self.fields.get("MaxTime", ""))

    def admits(self, account: str) -> bool:
        allowed, denied = self.fields.get("AllowAccounts", "ALL"), self.fields.get("DenyAccounts", "")
        return (allowed == "ALL" or account.lower() in allowed.lower().split(",")) and (
            account.lower() not in denied.lower().split(",")
        )


@dataclass(frozen=True)
class Association:
    """An account that the user may charge, on a `partition` ("": on all). `max_minutes` None: no limit."""

    account: str
    partition: str
    max_minutes: int | None


def ask_version() -> Answer:
    """Query the version of the installed Slurm, without the scheduler."""
    return run_command(["sbatch", "--version"], _DEADLINE_S)


def ask_partitions() -> Answer:
    """Query all partitions. `is_absent` is also True if the tools have no cluster."""
    answer = run_command(["scontrol", "--all", "show", "partition", "--oneliner"], _DEADLINE_S)
    return replace(answer, is_absent=answer.is_absent or _NO_CLUSTER in answer.error)


def ask_associations() -> Answer:
    """Query the user's accounts. Fails on a site without accounting."""
    words = [f"user={getpass.getuser()}", "format=Account,Partition,MaxWall"]
    return run_command(["sacctmgr", "--noheader", "--parsable2", "show", "assoc", *words], _DEADLINE_S)


def parse_associations(text: str) -> list[Association]:
    """Parse the answer of `ask_associations`.

    >>> parse_associations("proj.a|workq|1-00:00:00\\nproj.b||\\n")[0]
    Association(account='proj.a', partition='workq', max_minutes=1440)
    """
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 2]
    return [Association(account, partition, minutes(wall)) for account, partition, wall, *_ in rows]


def parse_partitions(text: str) -> list[Partition]:
    """Parse the answer of `ask_partitions`.

    >>> [(p.name, p.max_minutes) for p in parse_partitions("PartitionName=workq MaxTime=1-00:00:00 State=UP")]
    [('workq', 1440)]
    """
    found = (fields(line) for line in text.splitlines())
    return [Partition(one["PartitionName"], one) for one in found if "PartitionName" in one]


def chosen_partition(slurm: SlurmConfig, partitions: Sequence[Partition]) -> Partition | None:
    """Return the config's partition, else the site's default; None if it does not exist."""
    return next((p for p in partitions if (p.name == slurm.partition if slurm.partition else p.is_default)), None)


def refuse_what_cannot_start(launch: LaunchConfig) -> None:
    """Raise ConfigError if the partition would never start this job: Slurm may let such a job wait forever.

    Queries the scheduler once. Only sbatch checks a job with several partitions or a QOS, or if Slurm does not answer.
    """
    slurm = launch.slurm
    if "," in (slurm.partition or "") or "qos" in slurm.extra:
        return
    partitions = parse_partitions(ask_partitions().text)
    chosen = chosen_partition(slurm, partitions)
    if chosen is None:
        return
    if launch.num_nodes > chosen.max_nodes:
        raise ConfigError(
            f"launch.num_nodes (--nodes) = {launch.num_nodes}, but a job of partition {chosen.name} has at most "
            f"{chosen.max_nodes}. Ask for no more, or for another partition: "
            f"{', '.join(f'{p.name} (at most {p.max_nodes})' for p in partitions)}."
        )
    if chosen.max_minutes is not None and slurm.time_min > chosen.max_minutes:
        raise ConfigError(
            f"launch.slurm.time_min (--time) = {slurm.time_min}, but a job of partition {chosen.name} has at most "
            f"{chosen.max_minutes} minutes. Set --time {chosen.max_minutes}; follow-on jobs continue the run."
        )
