"""The tables of a fleet. A command or any INSERT may add a row: missing columns have defaults.

Times are unix seconds by the database's clock.
"""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()


def _integer(name: str, default: int) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, nullable=False, server_default=sa.text(str(default)))


def _text(name: str, default: str = "") -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False, server_default=default)


vms = sa.Table(
    "vms",
    metadata,
    sa.Column("vm_id", sa.Integer, primary_key=True),
    _text("name"),
    sa.Column("ip_address", sa.Text, nullable=False),
    _text("user"),
    _text("ssh_key_path"),
    _integer("port", 22),
    _text("host_key"),  # pinned: "ssh-ed25519 AAAA…"; empty: the fleet's known_hosts
    _text("transport", "ssh"),  # or local
    _text("python", "python3"),  # a Python with hpc_grpo
    _text("work_dir", "hpc-grpo-fleet"),  # below the user's home unless absolute
    _text("nvidia_smi", "nvidia-smi"),
    _integer("available_gpus", 0),
    _text("state", "new"),
    _text("error"),
    sa.Column("last_seen", sa.Double),
    sa.Column("poll_at", sa.Double, nullable=False, server_default=sa.text("0")),
    _integer("is_drained", 0),
    sqlite_autoincrement=True,  # A job's row names its VM by id, so the id of a deleted VM is never used again.
)

gpus = sa.Table(
    "gpus",
    metadata,
    sa.Column("vm_id", sa.Integer, sa.ForeignKey("vms.vm_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("gpu_index", sa.Integer, primary_key=True),
    _text("uuid"),
    _integer("memory_mib", 0),
    _integer("used_mib", 0),
    _integer("claimed_mib", 0),  # Memory of jobs that share the GPU. An exclusive job is in job_id.
    _integer("is_busy", 0),  # used by other processes, or by memory that belongs to no job
    sa.Column("job_id", sa.Text),
    sa.Column("attempt", sa.Integer),
    sa.Index("gpus_by_job", "job_id"),
)

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("job_id", sa.Text, primary_key=True),
    # What to run: a config of hpc-grpo, or arguments of train_grpo.py.
    _text("config_name"),
    _text("config"),
    _text("overrides", "[]"),
    _text("model"),
    _text("dataset"),
    _text("reward_function"),
    _integer("max_steps", 0),
    _text("output_dir"),
    _integer("use_unsloth", 0),
    _text("preprocessing"),
    # The resources of the job.
    _integer("num_gpus", 1),
    _integer("gpu_memory_mib", 0),  # on each GPU, shared with other jobs; 0: exclusive GPUs
    _integer("priority", 0),
    sa.Column("max_retries", sa.Integer),
    # The state of the job.
    _text("status", "queued"),
    _integer("retry_count", 0),
    _text("failure_reason"),
    _integer("attempt", 0),
    sa.Column("vm_id", sa.Integer),  # of the newest attempt
    sa.Column("step", sa.Integer),
    _integer("stalled", 0),
    _integer("is_cancelled", 0),
    sa.Column("exit_code", sa.Integer),
    sa.Column("submitted_at", sa.Double, nullable=False, server_default=sa.text("0")),
    sa.Column("changed_at", sa.Double, nullable=False, server_default=sa.text("0")),
    sa.Column("started_at", sa.Double),  # of the newest attempt, once its VM has started it
    sa.Column("retry_at", sa.Double),
    sa.Index("jobs_by_status", "status", "priority", "submitted_at"),
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("vm_id", sa.Integer, nullable=False),
    _text("gpus"),  # JSON list of indices
    _integer("gpu_memory_mib", 0),
    sa.Column("claimed_at", sa.Double, nullable=False),
    sa.Column("started_at", sa.Double),
    sa.Column("ended_at", sa.Double),
    _text("outcome"),  # exit, not_started, lost; empty while it runs
    sa.Column("exit_code", sa.Integer),
    _text("reason"),
)

vm_name: sa.ColumnElement[str] = sa.func.coalesce(sa.func.nullif(vms.c.name, ""), vms.c.ip_address)
HAS_ROOM = sa.and_(vms.c.state == "ready", vms.c.is_drained == 0, gpus.c.job_id.is_(None), gpus.c.is_busy == 0)
IS_FREE = sa.and_(HAS_ROOM, gpus.c.claimed_mib == 0)
"""Conditions on GPUs joined with their VMs. HAS_ROOM: jobs may share the GPU. IS_FREE: a job may have it alone."""
