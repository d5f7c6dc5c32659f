"""One Slurm job as `scontrol` and `sacct` describe it, and the few things that are done to jobs.

Each function is one call to the scheduler. Sites count those: a link makes a handful in its life, the commands
that show a run make none.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_grpo.config.launch_schema import LaunchConfig
from hpc_grpo.errors import LaunchError

_TIMEOUT_S = 60.0
WAITING_STATES = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "RUNNING", "SUSPENDED"})


@dataclass(frozen=True)
class SlurmJob:
    """The fields of `scontrol show job`, by Slurm's names; "(null)" and "N/A" are left out."""

    job_id: str
    fields: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(job_id: str, text: str) -> SlurmJob:
        """
        >>> SlurmJob.parse("7", "JobId=7 JobState=RUNNING Account=(null) NumNodes=2-2").fields
        {'JobId': '7', 'JobState': 'RUNNING', 'NumNodes': '2-2'}
        """
        found = re.findall(r"(?:^|\s)([A-Za-z:/]+)=(\S*)", text)
        return SlurmJob(job_id, {key: value for key, value in found if value not in ("(null)", "N/A", "")})

    @property
    def state(self) -> str:
        return self.fields.get("JobState", "")

    def launch(self, launch: LaunchConfig) -> LaunchConfig:
        """`launch` asking Slurm for what this job really has, whatever its submitter gave on the command line."""
        values: dict[str, Any] = {
            "num_nodes": int(self.fields["NumNodes"].partition("-")[0]),
            "time_min": minutes(self.fields.get("TimeLimit", "")) or launch.slurm.time_min,
            "partition": self.fields.get("Partition"),
            "account": self.fields.get("Account"),
        }
        if gpus := re.search(r"gpu(?::[^:,=]+)?[:=](\d+)", self.fields.get("TresPerNode", "")):
            values["gpus_per_node"] = int(gpus[1])
        per_task = int(self.fields.get("CPUs/Task", "1"))
        values["cpus_per_node"] = per_task if per_task > 1 else launch.slurm.cpus_per_node
        extra: dict[str, Any] = {"qos": self.fields.get("QOS"), **self._memory()}
        if self.fields.get("OverSubscribe") == "NO":
            extra["exclusive"] = True
        values["extra"] = {**launch.slurm.extra, **{key: value for key, value in extra.items() if value}}
        return launch.model_copy(update={"slurm": launch.slurm.model_copy(update=values)})

    def _memory(self) -> dict[str, str]:
        """Slurm shows "0" where nothing was asked for."""
        for name, option in (("MinMemoryNode", "mem"), ("MinMemoryCPU", "mem_per_cpu")):
            if self.fields.get(name, "0") != "0":
                return {option: self.fields[name]}
        return {}


def minutes(limit: str) -> int | None:
    """Slurm's time limit in minutes, rounded up; None for "UNLIMITED" and the like.

    >>> minutes("1-02:00:30")
    1561
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", limit)
    if match is None:
        return None
    days, hours, mins, secs = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + mins + (secs > 0)


def show_job(job_id: str) -> SlurmJob | None:
    """The job; None once Slurm has forgotten it (some minutes after its end)."""
    try:
        return SlurmJob.parse(job_id, _output(["scontrol", "show", "job", job_id]))
    except LaunchError:
        return None


def final_state(job_id: str) -> str:
    """How a job ended, as sacct says it ("CANCELLED by 1000"), else as scontrol does; "" where neither knows."""
    try:
        rows = _output(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State"]).split("\n")
    except LaunchError:
        rows = [""]  # no accounting on this site
    if rows[0].strip():
        return rows[0].strip()
    job = show_job(job_id)
    return job.state if job else ""


def is_users_cancel(state: str, uid: int | None = None) -> bool:
    """Whether a final state says that the user cancelled the job; an administrator's cancel is an interruption."""
    if not state.startswith("CANCELLED"):
        return False
    by = re.search(r"by (\d+)", state)
    return by is None or int(by[1]) == (os.getuid() if uid is None else uid)


def cancel_jobs(job_ids: Sequence[str]) -> None:
    """scancel; a job that is over already is no error. Raises LaunchError when Slurm does not answer."""
    _output(["scancel", "--quiet", *job_ids])


def exclude_nodes(job_id: str, nodes: Sequence[str]) -> None:
    """Keep a pending job off nodes. Raises LaunchError when Slurm refuses (too few nodes would be left)."""
    _output(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}"])


def _output(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{' '.join(argv)} failed: {error}") from error
    if done.returncode:
        raise LaunchError(f"{' '.join(argv)} failed: {done.stderr.strip()}")
    return done.stdout
