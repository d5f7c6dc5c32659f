"""Make the first tables: VMs, their GPUs, jobs, attempts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make what hpc_grpo.fleet.schema has."""
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("vm_id", sa.Integer(), nullable=False),
        sa.Column("gpus", sa.Text(), server_default="", nullable=False),
        sa.Column("claimed_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("outcome", sa.Text(), server_default="", nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempt"),
    )
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("config_name", sa.Text(), server_default="", nullable=False),
        sa.Column("config", sa.Text(), server_default="", nullable=False),
        sa.Column("overrides", sa.Text(), server_default="[]", nullable=False),
        sa.Column("model", sa.Text(), server_default="", nullable=False),
        sa.Column("dataset", sa.Text(), server_default="", nullable=False),
        sa.Column("reward_function", sa.Text(), server_default="", nullable=False),
        sa.Column("max_steps", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("output_dir", sa.Text(), server_default="", nullable=False),
        sa.Column("use_unsloth", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("preprocessing", sa.Text(), server_default="", nullable=False),
        sa.Column("num_gpus", sa.Integer(), server_default=sa.text("1"), nullable=False),
        sa.Column("priority", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("max_retries", sa.Integer(), nullable=True),
        sa.Column("status", sa.Text(), server_default="queued", nullable=False),
        sa.Column("retry_count", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("failure_reason", sa.Text(), server_default="", nullable=False),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("vm_id", sa.Integer(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("stalled", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("is_cancelled", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("submitted_at", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("changed_at", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("retry_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("job_id"),
    )
    op.create_index("jobs_by_status", "jobs", ["status", "priority", "submitted_at"], unique=False)
    op.create_table(
        "vms",
        sa.Column("vm_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), server_default="", nullable=False),
        sa.Column("ip_address", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), server_default="", nullable=False),
        sa.Column("ssh_key_path", sa.Text(), server_default="", nullable=False),
        sa.Column("port", sa.Integer(), server_default=sa.text("22"), nullable=False),
        sa.Column("host_key", sa.Text(), server_default="", nullable=False),
        sa.Column("transport", sa.Text(), server_default="ssh", nullable=False),
        sa.Column("python", sa.Text(), server_default="python3", nullable=False),
        sa.Column("work_dir", sa.Text(), server_default="hpc-grpo-fleet", nullable=False),
        sa.Column("nvidia_smi", sa.Text(), server_default="nvidia-smi", nullable=False),
        sa.Column("available_gpus", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("state", sa.Text(), server_default="new", nullable=False),
        sa.Column("error", sa.Text(), server_default="", nullable=False),
        sa.Column("last_seen", sa.Double(), nullable=True),
        sa.Column("poll_at", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("is_drained", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("vm_id"),
    )
    op.create_table(
        "gpus",
        sa.Column("vm_id", sa.Integer(), nullable=False),
        sa.Column("gpu_index", sa.Integer(), nullable=False),
        sa.Column("uuid", sa.Text(), server_default="", nullable=False),
        sa.Column("memory_mib", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("used_mib", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("is_busy", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["vm_id"], ["vms.vm_id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("vm_id", "gpu_index"),
    )
    op.create_index("gpus_by_job", "gpus", ["job_id"], unique=False)
