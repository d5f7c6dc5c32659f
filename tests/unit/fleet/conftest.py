"""A fleet in a folder, and simulated VMs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_grpo.fleet.controller import Controller
from hpc_grpo.fleet.db import Database
from hpc_grpo.fleet.settings import Fleet, FleetSettings
from tests.support.simulated_vms import SimulatedVm, add_vms

SETTINGS = FleetSettings()


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'fleet.db'}")
    database.create_tables()
    yield database
    database.close()


@pytest.fixture
def make_controller(db: Database, tmp_path: Path) -> Callable[..., tuple[Controller, dict[int, SimulatedVm]]]:
    """A maker of a controller of simulated VMs, which have rows; it returns both."""

    def make(
        count: int = 1, settings: FleetSettings = SETTINGS, **vm: object
    ) -> tuple[Controller, dict[int, SimulatedVm]]:
        machines = {vm_id: SimulatedVm(**vm) for vm_id in add_vms(db, count)}  # type: ignore[arg-type]
        fleet = Fleet(tmp_path, settings, f"sqlite:///{tmp_path / 'fleet.db'}", "")
        return Controller(fleet, lambda row: machines[row.vm_id]), machines

    return make
