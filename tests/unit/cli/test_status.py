from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from hpc_grpo.report.status import RunSummary
from hpc_grpo.run.chain import ChainRecord, write_chain
from tests.support.command import call
from tests.support.run_builder import RunBuilder


def training(built: RunBuilder) -> None:
    built.attempt(1, ends_at=time.time() + 7440.0)
    built.hold(1)
    built.state(1)


def test_status_is_a_table_of_all_runs(root: Path, built: RunBuilder) -> None:
    training(built)
    RunBuilder(root / "fresh")
    failed = RunBuilder(root / "broken")
    failed.attempt(1, "crash", why="The driver crashed;\n  see driver.log.")
    (root / "no-run").mkdir()
    lines = call("status").output.splitlines()
    assert lines[0].split("  ")[0] == "run"
    assert [line.split()[0] for line in lines[1:]] == ["adder", "broken", "fresh"]
    assert [line.split()[1] for line in lines[1:]] == ["training", "failed", "new"]
    assert "40/95  0.500   2.8k      1 h 06 min  2 h 03 min" in lines[1]
    assert lines[2].endswith("The driver crashed; see driver.log.")
    assert set(lines[3].split()[2:]) == {"-"}


def test_status_of_one_run_by_name_and_by_path(root: Path, built: RunBuilder) -> None:
    RunBuilder(root / "other")
    for name in ("adder", str(built.run.path), "runs/adder"):
        assert len(call("status", name).output.splitlines()) == 2


def test_status_as_json_has_every_field(built: RunBuilder) -> None:
    training(built)
    (entry,) = json.loads(call("status", "--json").output)
    assert list(entry) == [field.name for field in fields(RunSummary)]
    assert (entry["state"], entry["step"], entry["problem"]) == ("training", 40, None)
    assert entry["path"] == str(built.run.path)


def test_a_root_without_runs_is_named_and_no_error(root: Path) -> None:
    shown = call("status")
    assert (shown.exit_code, shown.stdout) == (0, "")
    assert str(root) in shown.stderr
    assert call("status", "--json").output == "[]\n"
    RunBuilder(Path("demo/runs/demo").absolute())
    told = " demo/runs has 1 run: hpc-grpo status --root demo/runs."
    for words in (["status"], ["disk", "du"], ["logs", "nothing"]):
        assert told in call(*words).stderr
    assert "demo" in call("status", "--root", "demo/runs").stdout


def test_root_names_another_folder(tmp_path: Path, root: Path) -> None:
    RunBuilder(tmp_path / "elsewhere" / "far")
    assert "far" in call("status", "--root", "elsewhere").output
    assert "far" in call("status", "far", "--root", "elsewhere").output
    assert call("status", "far").exit_code == 78


@pytest.mark.parametrize("command", ["status", "watch", "logs", "status --why"])
def test_a_wrong_name_ends_with_78_and_near_matches(built: RunBuilder, command: str) -> None:
    result = call(*command.split(), "ader")
    assert result.exit_code == 78
    assert "RUN = 'ader' must be a run directory" in result.stderr
    assert "Did you mean 'adder'?" in result.stderr
    assert result.stdout == ""


def test_explain_shows_every_attempt_and_what_to_do(built: RunBuilder) -> None:
    first = built.attempt(1, "crash", why="The driver crashed with exit code 1; see driver.log.", exit_code=1)
    built.log(first, "step 1\nTraceback (most recent call last):\n  File x\nMemoryError: no\n")
    built.attempt(2, "resumable", age_s=300.0, first_step=10)
    built.state(2, "stopped", step=25)
    printed = call("status", "--why", "adder").output
    assert "Attempt 1 (job 11)" in printed
    assert "1 min 40 s" in printed
    assert "steps      10, from step 0" in printed
    assert "ended      crash (exit code 1)" in printed
    assert "MemoryError: no" in printed
    assert "out of host memory" in printed
    assert "steps      15, from step 10" in printed
    assert printed.endswith("adder is now: stopped\n")


def test_explain_names_what_left_no_record(built: RunBuilder) -> None:
    record = built.attempt(1)
    for name in ("attempt.json", ".attempt.json.copy"):
        (built.folder(record) / name).write_text("")
    printed = call("status", "--why", "adder").output
    assert "attempts/1-11: its attempt.json is missing or damaged" in printed


def test_explain_and_logs_of_a_run_that_has_not_started(built: RunBuilder) -> None:
    built.chain("11")
    output = built.run.slurm_logs / "11_0_log.out"
    assert f"Slurm's output of job 11: {output}" in call("status", "--why", "adder").output
    assert f"Slurm's output of job 11: {output}" in call("logs", "adder").stderr


def test_output_of_a_job_that_ended_before_its_attempt(built: RunBuilder, tmp_path: Path) -> None:
    output = tmp_path / "grpo-11.out"
    write_chain(built.run, ChainRecord().with_link("11", output=str(output)))
    assert f"Slurm's output of job 11: {output}" in call("logs", "adder").stderr


def test_logs_prints_the_end_of_the_newest_attempt(built: RunBuilder) -> None:
    built.log(built.attempt(1, "crash"), "old\n")
    second = built.attempt(2)
    assert "is not there (yet)" in call("logs", "adder").stderr
    built.log(second, "".join(f"line {number}\n" for number in range(100)))
    assert call("logs", "adder", "--lines", "2").stdout == "line 98\nline 99\n"
    assert len(call("logs", "adder").stdout.splitlines()) == 50
    assert call("logs", "adder", "--attempt", "1").stdout == "old\n"


def test_logs_of_a_node_shows_its_actors_and_lists_all_of_rays(built: RunBuilder) -> None:
    record = built.attempt(1)
    node = built.folder(record) / "nodes" / "n1"
    (node / "ray").mkdir(parents=True)
    (node / "agent.log").write_text("agent says\n")
    (node / "ray_start.log").write_text("ray says\n")
    (node / "ray" / "raylet.out").write_text("12345")
    (node / "ray" / "worker-1f-02-77.err").write_text("an engine fails\n")
    (node / "ray" / "worker-1f-02-77.out").touch()
    printed = call("logs", "adder", "--node", "n1").output
    assert "agent says" in printed
    assert "ray says" in printed
    assert f"==> {node}/ray/worker-1f-02-77.err <==\nan engine fails\n" in printed
    assert f"==> {node}/ray/worker-1f-02-77.out <==" not in printed
    assert "12345" not in printed
    assert f"5 bytes  {node}/ray/raylet.out" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attempt", "3"], "--attempt = 3 must be an attempt of the run adder; it has: 1."),
        (["--node", "nn1"], "must be a node of attempt 1-11; it has: n1; did you mean 'n1'?"),
    ],
)
def test_logs_of_what_is_not_there_ends_with_78(built: RunBuilder, words: list[str], message: str) -> None:
    (built.folder(built.attempt(1)) / "nodes" / "n1").mkdir(parents=True)
    result = call("logs", "adder", *words)
    assert result.exit_code == 78
    assert message in result.stderr


def test_status_of_fifty_runs_is_fast_and_loads_nothing_heavy(root: Path) -> None:
    for number in range(50):
        built = RunBuilder(root / f"run-{number}")
        built.attempt(1, "crash")
        training(built)
        built.chain("11", "12", successor="12")
        built.run.metrics.write_text("not even JSON")
    program = (
        "import sys; from hpc_grpo.cli.status import status; status.main([], standalone_mode=False);"
        "print(sorted({'torch', 'ray', 'vllm', 'rich', 'pydantic', 'yaml', 'numpy'} & set(sys.modules)))"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    after = os.times()
    assert done.stdout.count("training") == 50
    assert done.stdout.splitlines()[-1] == "[]"
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    assert cpu_s < 2.0  # CPU seconds, independent of the machine's load; a fast one needs a tenth
