"""`hpc-grpo submit` as a user calls it: what it changes in a run, and what the next job asks Slurm for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import Result

from hpc_grpo.config import load_config, load_resolved
from hpc_grpo.errors import EXIT_CONFIG, EXIT_CRASH
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.run import frozen_config
from hpc_grpo.run.chain import ChainRecord, read_chain, write_chain
from hpc_grpo.run.lock import RunLock
from hpc_grpo.run.paths import RunDir
from tests.support.command import call
from tests.support.places import FakeJob, FakeQueue
from tests.support.run_builder import RunBuilder


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run that trained a step, in a job that had more time than its config says."""
    inputs = ["model.path=org/m", "data.train.path=org/rows", "eval.every=null"]
    run = freeze(load_config("local/debug", [f"run.root={tmp_path}", "launch.slurm.time_min=30", *inputs]), [], [])
    run.ledger.write_text('{"step": 1, "attempt": 1, "ordinals": [0]}\n')
    had = {"num_nodes": 2, "time_min": 90, "extra": {"qos": "long"}}
    write_chain(run, ChainRecord(ended="It was cancelled.", slurm=had).with_link("11"))
    return run


def resume(run: RunDir, *words: str) -> Result:
    return call("submit", str(run.path), *words)


def test_without_overrides_the_config_stays_as_it_is(run: RunDir, queue: FakeQueue) -> None:
    before = run.config.read_text()
    assert resume(run).exit_code == 0
    assert (queue.requests[0].launch.num_nodes, queue.requests[0].launch.slurm.time_min) == (2, 90)
    assert run.config.read_text() == before


def test_overrides_win_over_what_the_last_job_had(run: RunDir, queue: FakeQueue) -> None:
    words = ["launch.slurm.time_min=30", "launch.slurm.extra.exclude=n2", "launch.setup_lines+=[ulimit -l]"]
    result = resume(run, *words, "train.max_tokens_per_microbatch=64000")
    assert result.exit_code == 0, result.stderr
    launch = queue.requests[0].launch
    assert (launch.num_nodes, launch.slurm.time_min) == (2, 30)
    assert launch.slurm.extra == {"qos": "long", "exclude": "n2"}
    there = load_resolved(run.config)
    assert (there.train.max_tokens_per_microbatch, there.launch.num_nodes) == (64000, 1)
    assert there.launch.setup_lines == launch.setup_lines == ["ulimit -l"]


def test_a_memory_option_replaces_the_one_that_the_job_had(run: RunDir, queue: FakeQueue) -> None:
    chain = read_chain(run)
    write_chain(run, replace(chain, slurm=chain.slurm | {"extra": {"qos": "long", "mem": "9000M"}}))
    words = ["--one-job", "launch.slurm.extra.mem_per_cpu=2000"]
    assert resume(run, "--one-job").exit_code == resume(run, *words).exit_code == 0
    assert [request.launch.slurm.extra for request in queue.requests] == [
        {"qos": "long", "mem": "9000M"},
        {"qos": "long", "mem_per_cpu": 2000},
    ]


def test_a_forbidden_key_is_one_error_and_no_job_is_queued(run: RunDir, queue: FakeQueue) -> None:
    before = run.config.read_text()
    result = resume(run, "train.lr=1", "engine.vllm.max_num_seqs=9")
    assert result.exit_code == EXIT_CONFIG
    assert result.stderr.count("error: ") == 1
    assert "train.lr: 0.0001 there, 1.0 now" in result.stderr
    assert (queue.requests, run.config.read_text()) == ([], before)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("launch.slurm.extra.nodes=4", "must not hold nodes"),
        ("launch.notify=[./tell-me]", "must be an executable file"),
        ("launch.slurm.gpus_per_node=2", "need 3"),
    ],
)
def test_an_override_that_submit_would_refuse_leaves_the_config_as_it_is(
    word: str, message: str, run: RunDir, queue: FakeQueue
) -> None:
    before = run.config.read_text()
    result = resume(run, word)
    assert (result.exit_code, queue.requests, run.config.read_text()) == (EXIT_CONFIG, [], before)
    assert message in result.stderr


def test_a_run_that_is_held_keeps_its_config(run: RunDir, queue: FakeQueue) -> None:
    before = run.config.read_text()
    hold = RunLock.take(run, "17", 1)
    result = resume(run, "engine.vllm.max_num_seqs=9")
    hold.release()
    assert "is being trained by attempt 1" in result.stderr
    assert (queue.requests, run.config.read_text()) == ([], before)


def test_a_run_whose_job_is_over_resumes_less_than_a_minute_after_its_last_sign_of_life(
    run: RunDir, queue: FakeQueue
) -> None:
    RunBuilder.of(run).hold(1, beat_age_s=25.0)
    queue.jobs["11"] = FakeJob("11")
    assert "is being trained by attempt 1" in resume(run).stderr
    queue.jobs["11"].is_over = True
    assert resume(run).exit_code == 0


def test_more_steps_reopen_a_complete_run(run: RunDir, queue: FakeQueue) -> None:
    run.complete_marker.touch()
    for words in ([], ["engine.vllm.max_num_seqs=9"]):
        assert "is complete" in resume(run, *words).output
        assert not queue.requests
    assert resume(run, "train.total_steps=99").exit_code == 0
    assert len(queue.requests) == 3
    assert not run.is_complete()


def test_a_complete_run_stays_so_where_the_queue_refuses_to_extend_it(run: RunDir, queue: FakeQueue) -> None:
    run.complete_marker.write_text("step 1\n")
    before = run.config.read_text()
    queue.refused = 1
    result = resume(run, "train.total_steps=99")
    assert (result.exit_code, "too many jobs" in result.stderr) == (EXIT_CRASH, True)
    assert (run.complete_marker.read_text(), run.config.read_text()) == ("step 1\n", before)
    queue.refused = 0
    assert resume(run, "train.total_steps=99").exit_code == 0
    assert (len(queue.requests), run.is_complete()) == (3, False)


def test_a_key_that_the_runs_copy_does_not_know_is_refused_here_and_not_in_its_job(
    run: RunDir, queue: FakeQueue
) -> None:
    older = yaml.safe_load(run.config.read_text())
    del older["deadlines"]["silent_s"]  # as a package has it that came before this key
    frozen_config._write(run, older)
    result = resume(run, "deadlines.silent_s=77")
    assert (result.exit_code, queue.requests) == (EXIT_CONFIG, [])
    assert "which does not know deadlines.silent_s" in result.stderr
    assert resume(run, "deadlines.silent_s=77", "--accept-changes").exit_code == 0
    assert len(queue.requests) == 3
