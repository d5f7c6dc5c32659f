"""Open the fleet that a command is about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_grpo.fleet.db import Database
    from hpc_grpo.fleet.settings import Fleet


def open_folder(folder: Path | None) -> tuple[Fleet, Database]:
    """Return the fleet in `folder`, by default $HPC_GRPO_FLEET or ./fleet, and its database. Raises ConfigError."""
    from hpc_grpo.fleet.db import Database
    from hpc_grpo.fleet.settings import open_fleet

    fleet = open_fleet(folder)
    return fleet, Database(fleet.database_url)


def open_database(folder: Path | None) -> Database:
    return open_folder(folder)[1]
