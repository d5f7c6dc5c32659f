"""Let jobs share a GPU by the memory that they declare."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the columns; every claim so far is of whole GPUs."""
    for table, column in (("gpus", "claimed_mib"), ("jobs", "gpu_memory_mib"), ("attempts", "gpu_memory_mib")):
        op.add_column(table, sa.Column(column, sa.Integer(), server_default=sa.text("0"), nullable=False))
