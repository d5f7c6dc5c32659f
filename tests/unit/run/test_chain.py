"""The record of a run's jobs: who queued whom, which links count, and what the next one asks for."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.run.chain import ChainRecord, read_chain, write_chain
from hpc_grpo.run.files import write_record
from hpc_grpo.run.paths import RunDir

FIRST_CHAIN = ChainRecord(successor="9").with_link("6").with_link("7", "6")
TWO_CHAINS = FIRST_CHAIN.with_link("8").with_link("9", "8").with_link("10", "9")
"""6 queued 7; then the user submitted 8, with 9 and 10 behind it."""


def test_a_record_is_read_back_as_it_was_written(run_dir: RunDir) -> None:
    assert read_chain(run_dir) == ChainRecord()
    write_chain(run_dir, TWO_CHAINS)
    assert read_chain(run_dir) == TWO_CHAINS


def test_a_record_that_a_newer_version_wrote_is_read_without_what_it_knows_more(run_dir: RunDir) -> None:
    values = asdict(TWO_CHAINS)
    newer = [{**link, "cluster": "b"} for link in values["links"]]
    write_record(run_dir.chain, {**values, "links": newer, "budget": 7})
    assert read_chain(run_dir) == TWO_CHAINS


def test_a_job_that_is_known_keeps_its_place_and_its_output() -> None:
    record = TWO_CHAINS.with_link("8", "", 4, "/out").with_link("8", "", 5)
    assert [link.job_id for link in record.links] == ["6", "7", "8", "9", "10"]
    known = record.link("8")
    assert known is not None
    assert (known.first_step, known.output) == (5, "/out")


@pytest.mark.parametrize(("job_id", "behind"), [("6", ("7",)), ("8", ("9", "10")), ("10", ()), ("99", ())])
def test_the_jobs_behind_one_are_all_that_wait_for_it_in_turn(job_id: str, behind: tuple[str, ...]) -> None:
    assert TWO_CHAINS.followers(job_id) == behind


@pytest.mark.parametrize(("job_id", "successor"), [("8", "9"), ("6", ""), ("9", "")])
def test_the_recorded_successor_is_that_of_the_job_that_queued_it(job_id: str, successor: str) -> None:
    assert TWO_CHAINS.successor_behind(job_id) == successor


@pytest.mark.parametrize(
    ("job_id", "successor_of", "before"),
    [("10", "9", ["8", "9"]), ("9", "8", ["8"]), ("8", "", []), ("11", "", [])],
)
def test_the_links_before_a_job_count_from_the_users_last_one(
    job_id: str, successor_of: str, before: list[str]
) -> None:
    """11 is the user's own, and started before it is in the record."""
    assert [link.job_id for link in TWO_CHAINS.links_before(job_id, successor_of)] == before


@pytest.mark.parametrize(("job_id", "is_closed"), [("8", True), ("10", True), ("6", False), ("7", False)])
def test_a_chain_is_closed_by_its_last_jobs_not_by_those_of_an_earlier_chain(job_id: str, is_closed: bool) -> None:
    closed = TWO_CHAINS.closed_by(job_id, "It is complete.")
    assert (closed.successor, closed.ended) == (("", "It is complete.") if is_closed else ("9", ""))
    assert (closed is TWO_CHAINS) == (not is_closed)


def test_the_next_job_asks_for_what_the_last_one_had_and_goes_on_as_the_config_says() -> None:
    had = {"time_min": 90, "partition": "long", "max_job_chains": 1, "extra": {"qos": "high"}}
    record = ChainRecord().asking_for(LaunchConfig.model_validate({"num_nodes": 4, "slurm": had}))
    launch = record.launch(LaunchConfig.model_validate({"interface": "hsn0", "slurm": {"max_job_chains": 7}}))
    assert (launch.num_nodes, launch.interface) == (4, "hsn0")
    slurm = launch.slurm
    assert (slurm.time_min, slurm.partition, slurm.extra, slurm.max_job_chains) == (90, "long", {"qos": "high"}, 7)


def test_a_record_from_before_num_nodes_moved_is_understood(run_dir: RunDir) -> None:
    """The number of nodes was a key of `launch.slurm`, and is still kept there."""
    link = {"job_id": "7", "submitted_at": 1.0, "successor_of": "", "first_step": 0, "output": ""}
    slurm = {"num_nodes": 3, "min_nodes": None, "partition": "workq", "time_min": 30, "jobs_can_submit": True}
    run_dir.chain.parent.mkdir(parents=True, exist_ok=True)
    run_dir.chain.write_text(json.dumps({"links": [link], "successor": "", "ended": "", "slurm": slurm}))
    launch = read_chain(run_dir).launch(LaunchConfig())
    assert (launch.num_nodes, launch.slurm.partition, launch.slurm.time_min) == (3, "workq", 30)


def test_a_chain_record_keeps_the_form_that_it_has_always_had(tmp_path: Path) -> None:
    """A job of a 2-node run wrote it before the rename; follow-on jobs ask for as many nodes."""
    run = RunDir(tmp_path)
    run.chain.write_text('{"links": [], "successor": "", "ended": "", "slurm": {"num_nodes": 2, "time_min": 90}}')
    had = read_chain(run).launch(LaunchConfig(num_nodes=1))
    assert (had.num_nodes, had.slurm.time_min) == (2, 90)
    assert ChainRecord().asking_for(had).slurm["num_nodes"] == 2
    assert ChainRecord().asking_for(had).launch(LaunchConfig()) == had
