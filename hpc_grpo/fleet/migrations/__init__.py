"""The schema's versions, for alembic."""
