"""Run the migrations in the transaction that `Database.migrate` opened. Alembic executes this file."""

from __future__ import annotations

from alembic import context

from hpc_grpo.fleet.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
