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

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import LaunchError

_TIMEOUT_S = 60.0
_FINAL_STATES = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"]
)
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
        found = re.findall(r"(?:^|\s)([A-Za-z:/]+)=((?<=StdOut=).*|\S*)", text)
        return SlurmJob(job_id, {key: value for key, value in found if value not in ("(null)", "N/A", "")})

    @property
    def state(self) -> str:
        return self.fields.get("JobState", "")

    @property
    def output(self) -> str:
        """The file that its output goes to; "" where there is none."""
        path = self.fields.get("StdOut", "").strip()
        return path if path.startswith("/") else ""

    def launch(self, launch: LaunchConfig) -> LaunchConfig:
        """`launch` asking Slurm for what this job really has, whatever its submitter gave on the command line."""
        slurm = launch.slurm
        num_nodes = int(self.fields.get("NumNodes", str(slurm.num_nodes)).partition("-")[0])
        per_task = int(self.fields.get("CPUs/Task", "1"))
        values: dict[str, Any] = {
            "num_nodes": num_nodes,
            "time_min": minutes(self.fields.get("TimeLimit", "")) or slurm.time_min,
            "partition": self.fields.get("Partition", slurm.partition),
            "account": self.fields.get("Account", slurm.account),
            "gpus_per_node": self._gpus_per_node(num_nodes) or slurm.gpus_per_node,
            "cpus_per_node": per_task if per_task > 1 else slurm.cpus_per_node,
        }
        options: dict[str, Any] = {
            "qos": self.fields.get("QOS"),
            "constraint": self.fields.get("Features"),
            "reservation": self.fields.get("Reservation"),
            "exclude": self.fields.get("ExcNodeList"),
            "exclusive": self.fields.get("OverSubscribe") == "NO",
            "mem": self._memory_per_node(num_nodes),
        }
        given = {key: value for key, value in slurm.extra.items() if not (options["mem"] and key.startswith("mem"))}
        values["extra"] = {**given, **{key: value for key, value in options.items() if value}}
        return launch.model_copy(update={"slurm": slurm.model_copy(update=values)})

    def _gpus_per_node(self, num_nodes: int) -> int:
        """GPUs of a node: asked for by node, else all that were granted, by node; 0 without any."""
        if asked := re.findall(r"gpu(?::[^:,=]+)?[:=](\d+)", self.fields.get("TresPerNode", "")):
            return sum(map(int, asked))
        granted = re.search(r"gres/gpu=(\d+)", self.fields.get("TRES", self.fields.get("AllocTRES", "")))
        return int(granted[1]) // num_nodes if granted else 0

    def _memory_per_node(self, num_nodes: int) -> str | None:
        """What was granted, in MiB: Slurm shows "0" both for all memory and where nothing was asked for."""
        granted = re.search(r"\bmem=([\d.]+)([KMGT]?)", self.fields.get("TRES", self.fields.get("AllocTRES", "")))
        if granted is None:
            return None
        mib = float(granted[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[granted[2]]
        return f"{int(mib / num_nodes)}M"


def minutes(limit: str) -> int | None:
    """A time limit in any of Slurm's formats in minutes, rounded up; None for "UNLIMITED" and the like.

    >>> [minutes(limit) for limit in ("30", "90:30", "2:00:00", "1-2", "1-2:30", "1-02:00:30")]
    [30, 91, 120, 1560, 1590, 1561]
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if match is None:
        return None
    days, *given = match.groups()
    parts = [int(part) for part in given if part is not None]
    if days is None and len(parts) < 3:
        parts = [0, *parts]  # without days, hours come with seconds only
    hours, mins, secs = [*parts, 0, 0][:3]
    return (int(days or 0) * 24 + hours) * 60 + mins + -(-secs // 60)


def show_job(job_id: str) -> SlurmJob | None:
    """The job; None once Slurm has forgotten it (some minutes after its end).

    Raises LaunchError when Slurm does not answer.
    """
    try:
        text = output_of(["scontrol", "show", "job", job_id])
    except LaunchError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    # Of an array or a heterogeneous job there are several records.
    records = [SlurmJob.parse(job_id, record) for record in re.split(r"\n\s*\n", text) if record.strip()]
    return next((record for record in records if record.fields.get("JobId") == job_id), None)


def final_state(job_id: str) -> str:
    """How a job ended, as sacct says it ("CANCELLED by 1000"), else as scontrol does; "" where neither knows."""
    try:
        state = output_of(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State"]).partition("\n")[0].strip()
        if state.partition(" ")[0] in _FINAL_STATES:
            return state
    except LaunchError:
        pass  # no accounting on this site
    # Accounting may be behind.
    try:
        job = show_job(job_id)
    except LaunchError:
        return ""
    return job.state if job and job.state in _FINAL_STATES else ""


def is_users_cancel(state: str, uid: int | None = None) -> bool:
    """Whether a final state says that the user cancelled the job; an administrator's cancel is an interruption."""
    if not state.startswith("CANCELLED"):
        return False
    by = re.search(r"by (\d+)", state)
    return by is None or int(by[1]) == (os.getuid() if uid is None else uid)


def cancel_jobs(job_ids: Sequence[str]) -> None:
    """scancel; a job that is over already is no error. Raises LaunchError when Slurm does not answer."""
    output_of(["scancel", "--quiet", *job_ids])


def release_job(job_id: str) -> None:
    """Let a job go that was submitted on hold. Raises LaunchError when Slurm does not answer."""
    output_of(["scontrol", "release", job_id])


def exclude_nodes(job: SlurmJob, nodes: Sequence[str]) -> None:
    """Keep a pending job off further nodes.

    Raises LaunchError when its partition would have too few left, for which Slurm would let it wait for ever.
    """
    excluded = [*([job.fields["ExcNodeList"]] if "ExcNodeList" in job.fields else []), *nodes]
    partitions = [output_of(["scontrol", "show", "partition", name]) for name in job.fields["Partition"].split(",")]
    members = {node for text in partitions for node in _members(text)}
    needed = int(job.fields.get("NumNodes", "1").partition("-")[0])
    if len(members - set(_hostnames(",".join(excluded)))) < needed:
        raise LaunchError(f"without {', '.join(nodes)} its partition has fewer than {needed} nodes")
    output_of(["scontrol", "update", f"JobId={job.job_id}", f"ExcNodeList={','.join(excluded)}"])


def _members(partition: str) -> list[str]:
    """The nodes of a partition, of the text that Slurm shows of it."""
    listed = re.search(r"^\s*Nodes=(\S+)", partition, re.MULTILINE)
    return _hostnames(listed[1]) if listed else []


def _hostnames(node_list: str) -> list[str]:
    return output_of(["scontrol", "show", "hostnames", node_list]).split()


def output_of(argv: Sequence[str], environ: Mapping[str, str] | None = None, *, deadline_s: float = _TIMEOUT_S) -> str:
    """What one command of Slurm prints; `environ` instead of this process's. Raises LaunchError with its own words."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=deadline_s, env=environ, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{' '.join(argv)} failed: {error}") from error
    if done.returncode:
        raise LaunchError(f"{' '.join(argv)} failed: {done.stderr.strip()}")
    return done.stdout
