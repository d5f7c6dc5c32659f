"""Slurm's partitions, and what they allow: a job beyond it may be taken, only to wait for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_grpo.config import SlurmConfig
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.place.slurm.text import fields, granted, minutes, output_of

SHOW_PARTITIONS = ("scontrol", "--all", "show", "partition", "--oneliner")
_DEADLINE_S = 10.0
"""For an answer that sbatch gives in any case."""


@dataclass(frozen=True)
class Partition:
    """A partition in Slurm's own fields, of `scontrol show partition`."""

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
        """The most nodes that one job may have."""
        limit = self.fields.get("MaxNodes", "")
        return min(self.num_nodes, int(limit)) if limit.isdigit() else self.num_nodes

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs of its nodes on average, rounded up; None where Slurm does not account for them."""
        total = granted(self.fields.get("TRES", ""), "gres/gpu")
        return -(-int(total) // max(1, self.num_nodes)) if total else None

    @property
    def max_minutes(self) -> int | None:
        """The longest walltime; None: no limit."""
        return minutes(self.fields.get("MaxTime", ""))

    def admits(self, account: str) -> bool:
        allowed, denied = self.fields.get("AllowAccounts", "ALL"), self.fields.get("DenyAccounts", "")
        return (allowed == "ALL" or account.lower() in allowed.lower().split(",")) and (
            account.lower() not in denied.lower().split(",")
        )


def parse_partitions(text: str) -> list[Partition]:
    """
    >>> [(p.name, p.max_minutes) for p in parse_partitions("PartitionName=workq MaxTime=1-00:00:00 State=UP")]
    [('workq', 1440)]
    """
    found = (fields(line) for line in text.splitlines())
    return [Partition(one["PartitionName"], one) for one in found if "PartitionName" in one]


def chosen_partition(slurm: SlurmConfig, partitions: Sequence[Partition]) -> Partition | None:
    """The partition of the config, else the site's default."""
    wanted = [p for p in partitions if (p.name == slurm.partition if slurm.partition else p.is_default)]
    return wanted[0] if wanted else None


def refuse_what_cannot_start(slurm: SlurmConfig) -> None:
    """One call to the scheduler. Raises ConfigError where the partition never starts such a job.

    What it cannot know is left to sbatch: several partitions, limits that a QOS changes, a Slurm that does not answer.
    """
    if "," in (slurm.partition or "") or "qos" in slurm.extra:
        return
    try:
        partitions = parse_partitions(output_of(SHOW_PARTITIONS, deadline_s=_DEADLINE_S))
    except LaunchError:
        return
    chosen = chosen_partition(slurm, partitions)
    if chosen is None:
        return
    if slurm.num_nodes > chosen.max_nodes:
        raise ConfigError(
            f"launch.slurm.num_nodes (--nodes) = {slurm.num_nodes}, but a job of partition {chosen.name} has at most "
            f"{chosen.max_nodes}. Ask for no more, or for another partition: {_names(partitions)}."
        )
    if chosen.max_minutes is not None and slurm.time_min > chosen.max_minutes:
        raise ConfigError(
            f"launch.slurm.time_min (--time) = {slurm.time_min}, but a job of partition {chosen.name} has at most "
            f"{chosen.max_minutes} minutes. Set --time {chosen.max_minutes}; --until-complete carries the run on "
            f"from job to job."
        )


def _names(partitions: Sequence[Partition]) -> str:
    return ", ".join(f"{p.name} (at most {p.max_nodes})" for p in partitions)
