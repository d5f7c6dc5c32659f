"""The doorbell with a real nats-server, which `make machines-install` installs."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from hpc_grpo.fleet.controller import Controller
from hpc_grpo.fleet.db import Database, jobs
from hpc_grpo.fleet.dispatch import Dispatcher
from hpc_grpo.fleet.doorbell import Bell, announce
from hpc_grpo.fleet.observe import record
from hpc_grpo.fleet.settings import Fleet, FleetSettings
from tests.support.simulated_vms import SimulatedVm, add_jobs, add_vms

pytestmark = pytest.mark.places

SELDOM = FleetSettings(sweep_s=3600.0)


@pytest.fixture
def nats() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["nats-server", "-a", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        yield f"nats://127.0.0.1:{port}"
        server.terminate()


def test_an_announcement_has_a_dispatcher_start_the_job_long_before_its_sweep(nats: str, tmp_path: Path) -> None:
    database = Database(url := f"sqlite:///{tmp_path / 'fleet.db'}")
    database.create_tables()
    (vm_id,) = add_vms(database, 1)
    machine = SimulatedVm()
    record(database, vm_id, machine.observe(), frozenset(), SELDOM)
    add_jobs(database, 1)

    async def run() -> None:
        controller = Controller(Fleet(tmp_path, SELDOM, url, nats), lambda _vm: machine)
        loops = [asyncio.ensure_future(each) for each in (controller.bell.listen(), Dispatcher(controller).run())]
        try:
            while not machine.specs:  # the sweep once it hears
                await asyncio.sleep(0.05)
            with database.write() as connection:
                connection.execute(
                    sa.insert(jobs).values(job_id="announced", model="m", dataset="d", reward_function="r")
                )
            assert await announce(nats, ["announced"])
            while len(machine.specs) < 2:
                await asyncio.sleep(0.05)
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await controller.close()

    asyncio.run(asyncio.wait_for(run(), 60.0))
    assert [key.job_id for key in machine.specs] == ["job-1", "announced"]


def test_an_announcement_wakes_every_controller_and_one_that_nobody_heard_is_the_sweeps() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"nats://127.0.0.1:{port}"

    async def hear() -> list[list[str]]:
        assert not await announce(url, ["nobody-hears"])
        with subprocess.Popen(["nats-server", "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL) as server:
            bells = [Bell(url), Bell(url)]
            listening = [asyncio.ensure_future(bell.listen()) for bell in bells]
            try:
                assert [await bell.wait(30.0) for bell in bells] == [[], []]  # they hear from now on: sweep once
                assert await announce(url, ["job-1"])
                return [await bell.wait(30.0) for bell in bells]
            finally:
                for task in listening:
                    task.cancel()
                await asyncio.gather(*listening, return_exceptions=True)
                server.terminate()

    assert asyncio.run(asyncio.wait_for(hear(), 120.0)) == [["job-1"], ["job-1"]]


def test_a_controller_hears_again_after_nats_was_away(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, command = f"nats://127.0.0.1:{port}", ["nats-server", "-a", "127.0.0.1", "-p", str(port)]

    async def hear() -> list[str]:
        bell = Bell(url)
        listening = asyncio.ensure_future(bell.listen())
        try:
            for _ in range(2):  # the second is the server after a restart
                with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
                    await bell.wait(60.0)
                    assert await announce(url, ["job-1"])
                    heard = await bell.wait(30.0)
                    server.terminate()
            return heard
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    assert asyncio.run(asyncio.wait_for(hear(), 180.0)) == ["job-1"]
    said = capsys.readouterr().out
    assert said.count("NATS does not answer") == 2
    assert said.count("NATS answers again.") == 2
