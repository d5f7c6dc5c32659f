"""Queue the jobs that an older version has noted as pending."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Change rows alone."""
    op.execute("UPDATE jobs SET status = 'queued' WHERE status = 'pending'")
