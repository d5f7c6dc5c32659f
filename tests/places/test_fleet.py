"""A fleet on real machines: real ssh, real runners, NATS and PostgreSQL; stand-ins for training."""

from __future__ import annotations

import os
import signal

import pytest

from tests.places.conftest import wait_until
from tests.places.fleet_scene import fleet_on
from tools.virtual_machines import gpus
from tools.virtual_machines.beds import Bed

pytestmark = pytest.mark.places

VMS = ("vm1", "vm2", "vm3")


def test_two_controllers_run_each_job_once_on_gpus_of_its_own_and_leave_foreign_ones_alone(vms: Bed) -> None:
    with fleet_on(vms, VMS, postgres=True, nats=True) as fleet:
        gpus.occupy(vms.layout, "vm3", index=1)
        hostile = fleet.fleet("submit", "--id", "; touch $(pwd)/owned", "--model", "0.5", "--dataset", "`;rm -rf /x`",
                              "--reward_function", "--help").strip()  # fmt: skip
        fleet.up()
        fleet.up()
        wait_until(lambda: {fleet.vm_state(name) for name in VMS} == {"ready"}, 60, "all are ready")
        fleet.submit(14, "1.0")
        fleet.submit(2, "1.0", first=15, num_gpus=4)
        fleet.wait_for_all("completed", 17, 120)
        rows = fleet.rows()
        assert {job["attempt"] for job in rows["jobs"]} == {1}
        used = {gpu for note in fleet.runs() for gpu in note["gpus"]}
        assert "vm3-1" not in used
        assert {note["gpus"][0].partition("-")[0] for note in fleet.runs()} == set(VMS)
        (note,) = [one for one in fleet.runs() if one["argv"][2] == "--model=0.5"]
        assert note["argv"][2:] == ["--model=0.5", "--dataset=`;rm -rf /x`", "--reward_function=--help"]
        assert not list(fleet.folder.rglob("owned"))
        assert "on vm" in fleet.fleet("logs", hostile)
        assert fleet.fleet("logs", "job-1") == (fleet.folder / "logs" / "job-1.log").read_text()


def test_a_dispatcher_that_is_killed_between_claim_and_start_costs_its_job_no_retry(vms: Bed) -> None:
    with fleet_on(vms, ["vm1"], start_s=25.0, visit_s=300.0) as fleet:
        fleet.fleet("poll", "--once")
        vms.unplug("vm1")
        fleet.submit(1, "1.0")
        dispatcher = fleet.up("dispatch")
        wait_until(lambda: fleet.states() == ["running"], 30, "it is claimed")
        os.killpg(dispatcher.pid, signal.SIGKILL)
        vms.plug("vm1")
        fleet.up()
        fleet.wait_for_all("completed", 1, 90)
        job = fleet.job("job-1")
        assert (job["attempt"], job["retry_count"]) == (2, 0)
        assert [note["attempt"] for note in fleet.runs()] == [2]


def test_a_crash_is_tried_again_and_tells_why_and_a_cancelled_job_ends(vms: Bed) -> None:
    with fleet_on(vms, ["vm1"]) as fleet:
        fleet.submit(1, "0.2:1:0", max_retries=1)
        fleet.submit(1, "0.2:78", first=2)
        fleet.submit(1, "600", first=3)
        fleet.up()
        wait_until(lambda: any(note["job"] == "job-3" for note in fleet.runs()), 60, "the long one runs")
        fleet.fleet("cancel", "job-3")
        wait_until(lambda: fleet.states() == ["cancelled", "completed", "failed"], 60, "all are over")
        assert (fleet.job("job-1")["retry_count"], fleet.job("job-1")["attempt"]) == (1, 2)
        reasons = {(one["job_id"], one["attempt"]): one["reason"] for one in fleet.rows()["attempts"]}
        assert reasons["job-1", 1] == "RuntimeError: CUDA out of memory"
        assert (fleet.job("job-2")["exit_code"], fleet.job("job-2")["attempt"]) == (78, 1)
        assert (fleet.job("job-3")["exit_code"], fleet.job("job-3")["failure_reason"]) == (75, "it was cancelled")
