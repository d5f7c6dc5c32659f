"""`hpc-grpo resume` as a user calls it: what it changes in a run, and what the next job asks Slurm for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpc_grpo.cli import main
from hpc_grpo.config import LaunchConfig, load_config, load_resolved
from hpc_grpo.errors import EXIT_CONFIG
from hpc_grpo.launch.chain import submit as handing_in
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.preflight import inputs as preflight
from hpc_grpo.run.chain import ChainRecord, read_chain, write_chain
from hpc_grpo.run.lock import RunLock
from hpc_grpo.run.paths import RunDir


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LaunchConfig]:
    """What was handed in; Slurm is not asked."""
    launches: list[LaunchConfig] = []

    def submit_run(_run: RunDir, launch: LaunchConfig, *_more: object) -> str:
        launches.append(launch)
        return "77"

    monkeypatch.setattr(handing_in, "submit_run", submit_run)
    monkeypatch.setattr(preflight, "refuse_what_cannot_start", lambda _slurm: None)
    return launches


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """It trained a step, in a job that had more time than its config says."""
    inputs = ["model.path=org/m", "data.train.path=org/rows", "eval.every_steps=null"]
    run = freeze(load_config("local/debug", [f"run.root={tmp_path}", "launch.slurm.time_min=30", *inputs]), [], []).run
    run.ledger.write_text('{"step": 1, "attempt": 1, "ordinals": [0]}\n')
    had = {"num_nodes": 2, "time_min": 90, "extra": {"qos": "long"}}
    write_chain(run, ChainRecord(ended="It was cancelled.", slurm=had).with_link("11"))
    return run


def resume(run: RunDir, *words: str) -> Result:
    return CliRunner().invoke(main, ["resume", str(run.path), *words], catch_exceptions=False)


def test_without_overrides_the_config_stays_as_it_is(run: RunDir, asked: list[LaunchConfig]) -> None:
    before = run.config.read_text()
    assert resume(run).exit_code == 0
    assert (asked[0].num_nodes, asked[0].slurm.time_min) == (2, 90)
    assert run.config.read_text() == before


def test_overrides_win_over_what_the_last_job_had(run: RunDir, asked: list[LaunchConfig]) -> None:
    words = ["launch.slurm.time_min=30", "launch.slurm.extra.exclude=n2", "launch.setup_lines+=[ulimit -l]"]
    result = resume(run, *words, "train.logprob_chunk_tokens=64")
    assert result.exit_code == 0, result.stderr
    slurm = asked[0].slurm
    assert (asked[0].num_nodes, slurm.time_min, slurm.extra) == (2, 30, {"qos": "long", "exclude": "n2"})
    there = load_resolved(run.config)
    assert (there.train.logprob_chunk_tokens, there.launch.num_nodes) == (64, 1)
    assert there.launch.setup_lines == asked[0].setup_lines == ["ulimit -l"]


def test_another_memory_option_takes_the_place_of_the_one_the_job_had(run: RunDir, asked: list[LaunchConfig]) -> None:
    chain = read_chain(run)
    write_chain(run, replace(chain, slurm=chain.slurm | {"extra": {"qos": "long", "mem": "9000M"}}))
    assert resume(run).exit_code == resume(run, "launch.slurm.extra.mem_per_cpu=2000").exit_code == 0
    assert [launch.slurm.extra for launch in asked] == [
        {"qos": "long", "mem": "9000M"},
        {"qos": "long", "mem_per_cpu": 2000},
    ]


def test_a_forbidden_key_is_one_error_and_nothing_is_handed_in(run: RunDir, asked: list[LaunchConfig]) -> None:
    before = run.config.read_text()
    result = resume(run, "train.lr=1", "engine.max_num_seqs=9")
    assert result.exit_code == EXIT_CONFIG
    assert result.stderr.count("error: ") == 1
    assert "train.lr: 0.0001 there, 1.0 now" in result.stderr
    assert (asked, run.config.read_text()) == ([], before)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("launch.slurm.extra.nodes=4", "must not hold nodes"),
        ("launch.notify=[./tell-me]", "must be a file that can be executed"),
        ("launch.slurm.gpus_per_node=2", "need 3"),
    ],
)
def test_what_submit_would_refuse_is_no_part_of_the_run(
    word: str, told: str, run: RunDir, asked: list[LaunchConfig]
) -> None:
    before = run.config.read_text()
    result = resume(run, word)
    assert (result.exit_code, asked, run.config.read_text()) == (EXIT_CONFIG, [], before)
    assert told in result.stderr


def test_a_run_that_is_held_keeps_its_config(run: RunDir, asked: list[LaunchConfig]) -> None:
    before = run.config.read_text()
    hold = RunLock.take(run, "17", 1)
    result = resume(run, "engine.max_num_seqs=9")
    hold.release()
    assert "is being trained by attempt 1" in result.stderr
    assert (asked, run.config.read_text()) == ([], before)


def test_more_steps_reopen_a_complete_run(run: RunDir, asked: list[LaunchConfig]) -> None:
    run.complete_marker.touch()
    for words in ([], ["engine.max_num_seqs=9"]):
        assert "is complete" in resume(run, *words).output
        assert not asked
    assert resume(run, "train.total_steps=99").exit_code == 0
    assert len(asked) == 1
    assert not run.is_complete()
