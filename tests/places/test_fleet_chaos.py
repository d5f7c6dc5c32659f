"""What can happen to a fleet on real machines, a row each; minutes in all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.places.conftest import bed_of, wait_until
from tests.places.fleet_scene import FleetScene, fleet_on
from tools.virtual_machines import controller, daemons
from tools.virtual_machines.bed_layout import Shape
from tools.virtual_machines.beds import Bed

pytestmark = [pytest.mark.places, pytest.mark.long]

VMS = ("vm1", "vm2", "vm3", "vm4", "vm5")


@pytest.fixture(scope="module")
def five_vms() -> Iterator[Bed]:
    """Five VMs of four GPUs."""
    with bed_of(Shape("vms", 5)) as bed:
        yield bed


def test_two_dispatchers_a_hundred_jobs_five_vms_of_four_gpus(five_vms: Bed) -> None:
    with fleet_on(five_vms, VMS, postgres=True, nats=True) as fleet:
        for words in (("dispatch",), ("dispatch",), ("poll",), ("requeue",)):
            fleet.up(*words)
        began = time.monotonic()
        ids = fleet.submit(100, "2.0")
        fleet.wait_for_all("completed", 100, 540)
        rows = fleet.rows()
        assert [one["reason"] for one in rows["attempts"] if one["exit_code"] != 0] == []
        assert {job["attempt"] for job in rows["jobs"]} == {1}
        assert sorted(one["job_id"] for one in rows["attempts"]) == sorted(ids)
        assert sorted(note["job"] for note in fleet.runs()) == sorted(ids)
        assert all(gpu["job_id"] is None for gpu in rows["gpus"])
        used = {gpu for note in fleet.runs() for gpu in note["gpus"]}
        print(f"100 jobs of 2 s in {time.monotonic() - began:.0f} s, {len(used)} of 20 GPUs used, attempts: 100")


def test_nats_is_down_for_a_minute_and_then_its_store_is_wiped(five_vms: Bed) -> None:
    layout = five_vms.layout
    with fleet_on(five_vms, VMS[:2], nats=True) as fleet:
        fleet.up()
        fleet.submit(4, "1.0")
        fleet.wait_for_all("completed", 4, 120)
        controller.stop(layout, "nats")
        try:
            fleet.submit(6, "1.0", first=5)
            fleet.wait_for_all("completed", 10, 120)  # by the sweep
            time.sleep(60)
            controller.wipe(layout, "nats")
        finally:
            controller.start(layout, "nats")
        wait_until(lambda: "NATS answers again." in fleet.said(), 60, "the controller has found NATS again")
        fleet.fleet("submit", "--id", "rung", "--model", "1.0", "--dataset", "d", "--reward_function", "r")
        fleet.wait_for_all("completed", 11, 120)


def test_postgresql_is_stopped_for_a_minute(five_vms: Bed) -> None:
    layout = five_vms.layout
    with fleet_on(five_vms, VMS[:2], postgres=True, lease_s=150.0) as fleet:
        fleet.up()
        fleet.submit(4, "70.0")
        fleet.submit(4, "20.0", first=5)
        wait_until(lambda: len(fleet.runs()) == 8, 120, "all run")
        controller.stop(layout, "postgres")
        time.sleep(60)
        controller.start(layout, "postgres")
        fleet.wait_for_all("completed", 8, 180)
        assert {job["attempt"] for job in fleet.rows()["jobs"]} == {1}
        assert "waits for the database" in fleet.said()


def test_sshd_of_one_vm_is_frozen_and_it_turns_stale_then_lost(five_vms: Bed) -> None:
    # 20 s are less than visit_s: a VM that waited for the visit of the frozen one would turn stale, too.
    with fleet_on(five_vms, VMS[:3], lease_s=10.0, end_s=5.0, stale_s=20.0) as fleet:
        fleet.up()
        wait_until(lambda: all(fleet.vm_state(name) == "ready" for name in VMS[:3]), 60, "all are ready")
        daemons.freeze(five_vms.layout, "vm2", "sshd")
        try:
            oldest: dict[str, float] = {}
            states = []
            deadline = time.monotonic() + 180
            while states[-1:] != ["lost"]:
                assert time.monotonic() < deadline, states
                rows = fleet.rows()["vms"]
                now = time.time()
                for row in rows:
                    if row["name"] != "vm2":
                        oldest[row["name"]] = max(oldest.get(row["name"], 0.0), now - row["last_seen"])
                        assert row["state"] == "ready"
                    elif states[-1:] != [row["state"]]:
                        states.append(row["state"])
            assert [state for state in states if state != "ready"] == ["stale", "lost"]
            print(f"the others were never seen longer ago than {max(oldest.values()):.1f} s; vm2: {states}")
            assert max(oldest.values()) < 20.0
        finally:
            daemons.thaw(five_vms.layout, "vm2", "sshd")
        wait_until(lambda: fleet.vm_state("vm2") == "ready", 60, "it is back")


def test_a_vm_is_lost_in_mid_job_and_comes_back(five_vms: Bed) -> None:
    with fleet_on(five_vms, VMS[:2], lease_s=10.0, end_s=5.0) as fleet:
        fleet.submit(1, "60.0:0", num_gpus=4)
        fleet.up()
        wait_until(lambda: len(fleet.runs()) == 1, 60, "it runs")
        first = fleet.runs()[0]["gpus"][0].partition("-")[0]
        five_vms.unplug(first)
        try:
            wait_until(lambda: len(fleet.runs()) == 2, 180, "it runs again")
        finally:
            five_vms.plug(first)
        old, new = fleet.runs()
        assert old["ended"] < new["began"]
        print(f"the old runner ended {new['began'] - old['ended']:.1f} s before the new one began")
        wait_until(lambda: fleet.vm_state(first) == "ready", 90, "the VM is back")
        fleet.wait_for_all("completed", 1, 120)
        job = fleet.job("job-1")
        assert (job["retry_count"], job["attempt"]) == (1, 2)


def test_a_poller_is_killed_and_started_ten_times(five_vms: Bed) -> None:
    with fleet_on(five_vms, VMS[:3]) as fleet:
        fleet.up("dispatch")
        fleet.up("requeue")
        fleet.submit(30, "8.0")
        poller = fleet.up("poll")
        for _ in range(10):
            time.sleep(4.0)
            os.killpg(poller.pid, signal.SIGKILL)
            poller = fleet.up("poll")
        fleet.wait_for_all("completed", 30, 240)
        rows = fleet.rows()
        assert {job["attempt"] for job in rows["jobs"]} == {1}
        assert len(fleet.runs()) == 30


def test_a_vm_that_is_killed_and_started_anew_has_its_job_tried_again(five_vms: Bed) -> None:
    with fleet_on(five_vms, ["vm4"]) as fleet:
        fleet.submit(1, "20.0")
        fleet.up()
        wait_until(lambda: len(fleet.runs()) == 1, 60, "it runs")
        five_vms.kill("vm4", cut_network=True)
        time.sleep(5)
        five_vms.start("vm4")
        fleet.wait_for_all("completed", 1, 180)
        assert reasons(fleet) == ["its runner died: the VM was restarted, or somebody killed the runner", ""]
        assert fleet.job("job-1")["retry_count"] == 1


def reasons(fleet: FleetScene) -> list[str]:
    return [one["reason"] for one in sorted(fleet.rows()["attempts"], key=lambda one: one["attempt"])]
