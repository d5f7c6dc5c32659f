"""Have SQLite give each VM an id that no other ever had, as PostgreSQL does."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make the table of VMs anew; its GPUs, which go with the old one, are put back."""
    if op.get_bind().dialect.name != "sqlite":
        return
    op.execute("CREATE TEMPORARY TABLE kept_gpus AS SELECT * FROM gpus")
    with op.batch_alter_table("vms", recreate="always", table_kwargs={"sqlite_autoincrement": True}):
        pass
    op.execute("INSERT INTO gpus SELECT * FROM kept_gpus WHERE NOT EXISTS (SELECT 1 FROM gpus)")
    op.execute("DROP TABLE kept_gpus")
