"""A Slurm that remembers what it was asked, and links of a chain that ask it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

from hpc_grpo.config import Config, LaunchConfig
from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.chain.link import ChainLink
from hpc_grpo.launch.place.slurm.jobs import SlurmJob
from hpc_grpo.run.attempt import AttemptRecord, ExitKind
from hpc_grpo.run.paths import RunDir

CANCELLED = f"CANCELLED by {os.getuid()}"


@dataclass
class FakeSlurm:
    """Jobs by id; `submitted` and `cancelled` in order."""

    jobs: dict[str, dict[str, str]] = field(default_factory=dict)
    final: dict[str, str] = field(default_factory=dict)
    submitted: list[tuple[str, str, LaunchConfig]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    excluded: dict[str, list[str]] = field(default_factory=dict)
    notified: list[tuple[str, str]] = field(default_factory=list)
    is_silent: bool = False

    def submit(self, launch: LaunchConfig, run: RunDir, command: str, *, after: str) -> str:
        if self.is_silent:
            raise LaunchError("sbatch refused the job: try later")
        job_id = str(100 + len(self.submitted))
        self.submitted.append((job_id, after, launch))
        assert f"--successor-of {after}" in command
        self.jobs[job_id] = {"JobState": "PENDING"}
        return job_id

    def show_job(self, job_id: str) -> SlurmJob | None:
        if self.is_silent:
            raise LaunchError("scontrol show job failed: timeout")
        return SlurmJob(job_id, self.jobs[job_id]) if job_id in self.jobs else None

    def cancel_jobs(self, job_ids: list[str]) -> None:
        if self.is_silent:
            raise LaunchError("scancel failed: no scancel")
        self.cancelled += job_ids

    def exclude_nodes(self, job: SlurmJob, nodes: list[str]) -> None:
        self.excluded[job.job_id] = nodes


def config(
    max_job_chains: int | None = None, jobs_can_submit: bool = True, max_node_hours: float | None = None
) -> Config:
    values: dict[str, Any] = {
        "run": {"name": "r"},
        "model": {"path": "m"},
        "data": {"train": {"path": "d"}},
        "train": {"total_steps": 1, "max_tokens_per_microbatch": 8192},
        "launch": {
            "notify": ["tell-me"],
            "slurm": {
                "max_job_chains": max_job_chains,
                "jobs_can_submit": jobs_can_submit,
                "max_node_hours": max_node_hours,
            },
            "max_stalled_attempts": 3,
        },
    }
    return Config.model_validate(values)


def link(run: RunDir, job_id: str, successor_of: str = "", max_job_chains: int | None = None) -> ChainLink:
    return ChainLink(run, config(max_job_chains), job_id, successor_of, "hpc_grpo.driver.main")


def ended(kind: ExitKind, lost: dict[str, str] | None = None, signalled: str = "") -> AttemptRecord:
    record = AttemptRecord(1, "7", "slurm", ["nid001"], time.time(), None, 1)
    record.end(kind, 1, f"It ended as {kind}.")
    record.lost_nodes, record.signalled = lost or {}, signalled
    return record
