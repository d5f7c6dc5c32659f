from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_grpo.report.explain import Explanation, explain_attempts
from hpc_grpo.report.status import read_records
from hpc_grpo.run.chain import ChainRecord, write_chain
from tests.support.run_builder import RunBuilder

OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=11.batch."


def explained(built: RunBuilder) -> list[Explanation]:
    return explain_attempts(read_records(built.run), time.time())


def causes(built: RunBuilder) -> list[str]:
    return [entry.advice.cause if entry.advice else "" for entry in explained(built)]


def slurm_printed(built: RunBuilder, text: str) -> None:
    built.run.slurm_logs.mkdir()
    (built.run.slurm_logs / "11_0_log.out").write_text(text)


def test_steps_are_what_the_next_attempt_starts_from(built: RunBuilder) -> None:
    built.attempt(1, "crash", first_step=0)
    built.attempt(2, "node_lost", first_step=10)
    built.attempt(3, "crash", first_step=10)
    built.state(3, step=17)
    assert [entry.num_steps for entry in explained(built)] == [10, 0, 7]
    built.attempt(4, "bringup_failed", first_step=15)
    assert [entry.num_steps for entry in explained(built)] == [10, 0, 5, 0]


def test_steps_of_a_run_that_published_nothing_are_unknown(built: RunBuilder) -> None:
    built.attempt(1, "bringup_failed")
    (entry,) = explained(built)
    assert entry.num_steps is None
    assert "steps      -" in str(entry)


def test_a_running_attempt_needs_no_advice(built: RunBuilder) -> None:
    built.log(built.attempt(1, age_s=120.0), "error: an earlier life of the driver\n")
    built.hold(1)
    (entry,) = explained(built)
    assert (entry.kind, entry.advice) == ("running", None)
    assert entry.duration_s is not None and 119 < entry.duration_s < 130
    assert "not yet: it is running" in str(entry)
    built.attempt(2, age_s=120.0, signalled="SIGTERM")
    built.hold(2)
    assert "not yet: SIGTERM asked it to" in str(explained(built)[1])


def test_a_killed_attempt_lasted_until_its_last_sign_of_life(built: RunBuilder) -> None:
    built.attempt(1, age_s=600.0)
    built.hold(1, beat_age_s=200.0)
    (entry,) = explained(built)
    assert entry.kind == "killed"
    assert entry.duration_s is not None and 399 < entry.duration_s < 401
    built.attempt(2, age_s=100.0)
    assert explained(built)[0].duration_s is None


def test_killed_at_the_end_of_the_allocation_is_walltime(built: RunBuilder) -> None:
    built.attempt(1, age_s=7200.0, ends_at=time.time() - 3600.0)
    built.hold(1, beat_age_s=3605.0)
    assert (explained(built)[0].kind, causes(built)) == ("walltime", ["walltime"])


@pytest.mark.parametrize(
    "line",
    [
        OOM,
        "slurmstepd-n1: error: StepId=11.batch exceeded memory limit (607739904 > 104857600), being killed",
        "slurmstepd: error: Exceeded job memory limit",
        "srun: error: n1: task 0: Out Of Memory",
    ],
)
def test_slurms_line_about_a_memory_kill_names_the_cause(built: RunBuilder, line: str) -> None:
    built.attempt(1)
    built.hold(1, beat_age_s=300.0)
    slurm_printed(built, f"Attempt 1 of run adder\n{line}\n")
    assert (explained(built)[0].error, causes(built)) == (line, ["out of host memory (probably)"])


def test_the_output_of_a_job_of_the_users_own_script_is_read_where_its_link_says(
    built: RunBuilder, tmp_path: Path
) -> None:
    built.attempt(1)
    built.attempt(2, age_s=100.0)
    output = tmp_path / "grpo-11.out"
    output.write_text(f"Attempt 1 of run adder\n{OOM}\nslurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2026 ***\n")
    expected = dict.fromkeys((tmp_path / "%x-11.out", tmp_path, tmp_path / "no" / "such.out"), "killed without a word")
    for path, cause in (expected | {output: "out of host memory (probably)"}).items():
        write_chain(built.run, ChainRecord().with_link("11", output=str(path)).with_link("12", "11"))
        assert causes(built)[0] == cause
    assert explained(built)[0].error == OOM


def test_an_error_that_the_reason_quotes_is_not_repeated(built: RunBuilder) -> None:
    why = "Something must be changed first: model.path = m is no model; see driver.log."
    built.log(built.attempt(1, "config", why=why), "error: model.path = m is no model.\n")
    built.log(built.attempt(2, "config", why=why), "error: model.path = m is no model.\n  It has no tokenizer.\n")
    once, more = map(str, explained(built))
    assert once.count("is no model") == 1
    assert "said       error: model.path = m is no model.\n             " in more


@pytest.mark.parametrize(
    ("said", "expected"),
    [("", "cancelled"), (" DUE TO TIME LIMIT", "walltime"), (" DUE TO NODE FAILURE", "node lost")],
)
@pytest.mark.parametrize("program", ["slurmstepd", "slurmstepd-nid001"])  # the latter: built for several slurmd
def test_an_attempt_killed_after_a_signal_ended_for_the_reason_that_slurm_gives(
    built: RunBuilder, said: str, expected: str, program: str
) -> None:
    built.attempt(1, signalled="SIGTERM", signalled_at=time.time() - 500.0)
    built.attempt(2, age_s=100.0)
    slurm_printed(built, f"{program}: error: *** JOB 11 ON n1 CANCELLED AT 2026-11-22T00:00:00{said} ***\n")
    assert causes(built)[0] == expected


def test_the_end_of_the_log_counts_where_no_error_stands_out(built: RunBuilder) -> None:
    built.log(built.attempt(1, "crash"), "step 1\n[rank0]: NCCL watchdog: collective operation timeout\n")
    built.log(built.attempt(2, "crash"), "NCCL timed out\n" + "step\n" * 100)
    assert causes(built) == ["nodes stopped talking (NCCL or Gloo)", "not recognised"]


@pytest.mark.parametrize(
    ("source", "is_submitted", "command"),
    [
        ("slurm", True, "hpc-grpo submit RUN"),
        ("slurm", False, "hpc-grpo train RUN"),
        ("local", False, "hpc-grpo train RUN"),
        ("ssh", False, "hpc-grpo train RUN"),
        ("joined", False, "the command that started it"),
    ],
)
def test_the_command_to_go_on_is_the_one_that_started_the_attempt(
    built: RunBuilder, source: str, is_submitted: bool, command: str
) -> None:
    record = built.attempt(1, "crash")
    replace(record, source=source).save(built.folder(record))
    if is_submitted:
        built.chain("11")
    (entry,) = explained(built)
    assert entry.advice is not None
    assert f"{command} tries again from the last checkpoint." in entry.advice.todo


def test_a_resumable_attempt_shows_why_its_driver_stopped(built: RunBuilder) -> None:
    built.log(built.attempt(1, "resumable"), "Traceback (most recent call last):\nStopping after step 3: the clock.\n")
    assert (explained(built)[0].error, causes(built)) == ("Stopping after step 3: the clock.", ["stopped in time"])


def test_an_attempt_killed_after_it_lost_a_node_has_the_cause_node_lost(built: RunBuilder) -> None:
    built.attempt(1, signalled="SIGTERM", lost_nodes={"n2": "its agent ended"})
    built.attempt(2, age_s=100.0)
    assert causes(built)[0] == "node lost"


def test_lost_nodes_and_restarts_are_listed(built: RunBuilder) -> None:
    built.attempt(1, "node_lost", lost_nodes={"n2": "its agent ended"}, restarts=["It crashed.", "Again."])
    text = str(explained(built)[0])
    fields = ("nodes      2: n1, n2", "lost node  n2: its agent ended", "restarted  It crashed.", "restarted  Again.")
    assert all(field in text for field in fields)
