"""Handing a run in, to a Slurm that remembers what it was asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.chain import submit as handing_in
from hpc_grpo.launch.chain.submit import submit_run
from hpc_grpo.run.chain import read_chain
from hpc_grpo.run.paths import RunDir


class FakeSlurm:
    """`asked` is what was asked of it, in order; `minutes` the jobs' walltimes. Refuses the job number `refused`."""

    def __init__(self, refused: int = 0) -> None:
        self.asked: list[str] = []
        self.minutes: list[int] = []
        self._refused = refused
        self._num_jobs = 0

    def submit(self, launch: LaunchConfig, run: RunDir, command: str, **options: Any) -> str:
        self._num_jobs += 1
        if self._num_jobs == self._refused:
            raise LaunchError("sbatch refused the job: too many jobs.")
        self.asked.append(f"submit after={options.get('after')} hold={options.get('hold', False)}")
        self.minutes.append(launch.slurm.time_min)
        return str(self._num_jobs)

    def cancel_jobs(self, job_ids: Any) -> None:
        self.asked.append(f"cancel {','.join(job_ids)}")

    def release_job(self, job_id: str) -> None:
        self.asked.append(f"release {job_id}")


def use(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(handing_in.slurm, "submit", fake.submit)
    monkeypatch.setattr(handing_in, "cancel_jobs", fake.cancel_jobs)
    monkeypatch.setattr(handing_in, "release_job", fake.release_job)
    return fake


def launch(jobs_can_submit: bool, max_job_chains: int | None, max_node_hours: float | None = None) -> LaunchConfig:
    slurm = {"jobs_can_submit": jobs_can_submit, "max_job_chains": max_job_chains, "max_node_hours": max_node_hours}
    return LaunchConfig.model_validate({"slurm": slurm})


def handed_in(run: RunDir, launch: LaunchConfig) -> str:
    return submit_run(run, launch, "driver")


def test_one_job_is_submitted_where_it_can_submit_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(FakeSlurm(), monkeypatch)
    assert handed_in(RunDir(tmp_path), launch(True, None)) == "1"
    assert fake.asked == ["submit after=None hold=False"]
    assert [(link.job_id, link.successor_of) for link in read_chain(RunDir(tmp_path)).links] == [("1", "")]


def test_what_it_asks_for_is_what_the_next_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a ceiling cut the time of this one, and where it is cancelled before it starts."""
    fake = use(FakeSlurm(), monkeypatch)
    run, asked = RunDir(tmp_path), launch(True, None, max_node_hours=0.5)
    handed_in(run, asked)
    assert (fake.minutes, asked.slurm.time_min) == ([30], 60)
    assert read_chain(run).launch(launch(True, None)).slurm.time_min == 60


def test_a_stop_of_before_is_removed_unless_the_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = use(FakeSlurm(), monkeypatch)
    run = RunDir(tmp_path)
    run.stop_marker.touch()
    with pytest.raises(ConfigError, match="max_node_hours"):
        handed_in(run, launch(True, None, max_node_hours=0.001))
    assert (run.stop_marker.exists(), fake.asked) == (True, [])
    handed_in(run, launch(True, None))
    assert not run.stop_marker.exists()
    assert "Removed STOP" in capsys.readouterr().err


def test_else_all_are_queued_before_the_first_may_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(FakeSlurm(), monkeypatch)
    handed_in(RunDir(tmp_path), launch(False, 2))
    first, *others, last = fake.asked
    assert first == "submit after=None hold=True"
    assert others == ["submit after=1 hold=False", "submit after=2 hold=False"]
    assert last == "release 1"
    links = read_chain(RunDir(tmp_path)).links
    assert [(link.job_id, link.successor_of) for link in links] == [("1", ""), ("2", "1"), ("3", "2")]


def test_handing_in_again_cancels_what_waits_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeSlurm(), monkeypatch)
    handed_in(RunDir(tmp_path), launch(False, 1))
    fake = use(FakeSlurm(), monkeypatch)
    handed_in(RunDir(tmp_path), launch(True, 0))
    assert fake.asked[0] == "cancel 1,2"


def test_a_follow_on_job_that_is_refused_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(FakeSlurm(refused=3), monkeypatch)
    with pytest.raises(LaunchError, match=r"too many jobs\. It was follow-on job 2; the jobs before it were cancelled"):
        handed_in(RunDir(tmp_path), launch(False, 5))
    assert fake.asked[-1] == "cancel 1,2"
    assert read_chain(RunDir(tmp_path)).links == ()


def test_all_that_are_queued_at_once_share_the_node_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(FakeSlurm(), monkeypatch)
    handed_in(RunDir(tmp_path), launch(False, 9, max_node_hours=2.5))
    assert fake.minutes == [60, 60, 30]
