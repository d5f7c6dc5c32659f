"""`hpc-grpo cluster doctor`: exit code, table, JSON, and the job of --nodes with a Slurm of shell scripts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpc_grpo.cli import main
from hpc_grpo.errors import EXIT_CONFIG
from tests.support.model_folders import make_model

PARTITION = "PartitionName=workq AllowAccounts=ALL Default=YES MaxTime=UNLIMITED State=UP TotalNodes=2 TRES=cpu=16"
ROW = '{"question": "What is 1+1?", "answer": "2"}\n'
JOB = 'bash -c "$script" > /dev/null 2>&1 &'
SBATCH_RUNS_IT = f"""script=$(cat)
[[ $1 == --test-only ]] && {{ echo 'sbatch: Job 7 to start at 2026-01-01T00:00:00' >&2; exit; }}
{JOB}
echo 'Submitted batch job 77'"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model and data for local/debug, on a machine without Slurm and without GPUs."""
    for name in ("demo/train.jsonl", "demo/eval.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(ROW)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    make_model(tmp_path / "demo/model", {"model_type": "llama", "vocab_size": 1000, **shape})
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "cat", "touch"):
        (tools / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("SLURM", "HF_")) or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tool(place: Path, name: str, script: str) -> None:
    path = place / "tools" / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def slurm_of_scripts(place: Path, sbatch: str = SBATCH_RUNS_IT) -> None:
    tool(place, "scontrol", f"echo '{PARTITION}'")
    tool(place, "sacctmgr", "echo 'proj.a||'")
    tool(place, "srun", "exit 1")
    tool(place, "sbatch", sbatch)


def doctor(*words: str) -> Result:
    return CliRunner().invoke(main, ["cluster", "doctor", *words], catch_exceptions=False)


def findings(result: Result) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in json.loads(result.stdout)}


def test_a_good_machine_without_slurm_ends_with_0(place: Path) -> None:
    result = doctor("local/debug")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.endswith(":") and not line.startswith(" ")] == [
        "login:",
        "nodes:",
        "between nodes:",
    ]
    assert f"  ok      model           demo/model is in {place / 'demo/model'}" in lines
    assert "  skipped partition       no scontrol on PATH" in lines
    assert " 0 failures, " in lines[-1]
    assert not (place / "runs").exists()


def test_a_failure_ends_with_78_and_its_fix_is_below_it(place: Path) -> None:
    result = doctor("local/debug", "data.eval.path=gone.jsonl")
    assert result.exit_code == 78
    lines = result.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("  failure data "))
    assert lines[at + 1] == "          fix: set data.train.path and data.eval.path"
    assert " 1 failure, " in lines[-1]


def test_a_single_machine_needs_no_interface_between_nodes(place: Path) -> None:
    result = doctor("local/debug", "launch.interface=hsn9", "launch.num_nodes=2", "--json")
    assert (result.exit_code, findings(result)["interface"]["says"]) == (0, "lo has 127.0.0.2")


def test_json_is_a_list_of_findings_with_their_groups(place: Path) -> None:
    result = doctor("local/debug", "--json", "data.eval.path=gone.jsonl")
    assert result.exit_code == 78
    found = findings(result)
    assert found["data"]["status"] == "failure"
    assert {finding["group"] for finding in found.values()} == {"login", "nodes", "between nodes"}
    assert all(set(finding) == {"group", "check", "status", "says", "fix"} for finding in found.values())


def test_without_a_config_the_checks_that_need_one_say_so(place: Path) -> None:
    result = doctor("--json")
    assert result.exit_code == 0
    needing = {check for check, finding in findings(result).items() if finding["says"] == "give a CONFIG"}
    assert needing == {"config", "disk", "model", "data", "inputs", "environments"}


def test_an_override_needs_a_config_to_change(place: Path) -> None:
    done = CliRunner().invoke(main, ["cluster", "doctor", "--set", "launch.interface=lo"])
    assert (done.exit_code, "give a CONFIG first" in done.output) == (EXIT_CONFIG, True)


def test_a_config_that_does_not_load_is_a_finding(place: Path) -> None:
    result = doctor("local/debug", "train.lrr=1", "--json")
    assert result.exit_code == 78
    assert "did you mean 'lr'?" in findings(result)["config"]["says"]
    assert findings(result)["model"]["says"] == "the CONFIG does not load"


@pytest.mark.parametrize(
    "script", ["exit 1", "echo $'\\xff\\xfe|||'", "echo 'PartitionName= TotalNodes=many'", "kill -9 $$"]
)
def test_broken_commands_give_findings_and_no_traceback(place: Path, script: str) -> None:
    for name in ("scontrol", "sacctmgr", "sbatch", "nvidia-smi"):
        tool(place, name, script)
    result = doctor("local/debug", "--json")
    assert result.exit_code == 78
    assert findings(result)["partition"]["status"] == "failure"
    assert findings(result)["partition"]["fix"]
    assert "Traceback" not in result.output


def test_on_a_login_node_nodes_are_examined_when_asked_for(place: Path) -> None:
    slurm_of_scripts(place)
    found = findings(doctor("local/debug", "--json"))
    assert found["partition"]["says"] == "workq is up: 2 nodes"
    assert found["submit options"]["says"] == "Job 7 to start at 2026-01-01T00:00:00"
    assert (found["nodes"]["status"], "--nodes N" in found["nodes"]["says"]) == ("skipped", True)


def test_the_findings_of_the_job_are_printed_by_the_command(place: Path) -> None:
    slurm_of_scripts(place)
    result = doctor("local/debug", "--nodes", "1", "--json")
    assert result.exit_code == 0, result.output
    found = findings(result)
    assert found["answers"]["group"] == "nodes"
    assert found["model"]["group"] == "login"
    assert "Job 77 examines 1 node;" in result.stderr
    assert not (place / "runs" / ".doctor").exists()


def test_nothing_is_submitted_when_it_cannot_work(place: Path) -> None:
    slurm_of_scripts(place)
    result = doctor("local/debug", "launch.slurm.partition=nope", "--nodes", "1", "--json")
    assert result.exit_code == 78
    assert findings(result)["partition"]["fix"].endswith("one of: workq")
    assert findings(result)["nodes"]["says"] == "no job was submitted; fix first: partition"
    assert not (place / "runs").exists()


def test_a_secret_in_the_config_submits_no_job_and_is_written_nowhere(place: Path) -> None:
    slurm_of_scripts(place)
    result = doctor("local/debug", "launch.env.MY_TOKEN=hunter2-hunter2", "--nodes", "1")
    assert result.exit_code == 78
    assert "no job was submitted; fix first: variables" in result.stdout
    assert "hunter2" not in result.output
    assert not (place / "runs").exists()


def test_an_allocation_whose_slurm_does_not_answer_is_a_finding(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "nid[001-002]")
    result = doctor("local/debug", "--json")
    assert result.exit_code == 78
    assert "scontrol show job" in findings(result)["allocation"]["says"]


def test_a_job_that_dies_is_not_waited_for(place: Path) -> None:
    slurm_of_scripts(place)
    result = doctor("local/debug", "launch.setup_lines=[echo no such module; exit 3]", "--nodes", "1", "--json")
    assert result.exit_code == 78
    assert "job 77 ended without findings" in findings(result)["job"]["says"]


def test_a_job_that_does_not_start_in_time_is_called_off(place: Path) -> None:
    slurm_of_scripts(place, SBATCH_RUNS_IT.replace(JOB, ""))
    result = doctor("local/debug", "--nodes", "1", "--wait-min", "0.02", "--json")
    assert result.exit_code == 78
    assert "within 0.02 min" in findings(result)["job"]["says"]
    assert "scancel 77" in findings(result)["job"]["says"], "this Slurm has no scancel: it is left to the user"


def test_a_refusal_of_sbatch_is_a_finding_in_its_own_words(place: Path) -> None:
    slurm_of_scripts(place, "echo 'sbatch: error: Invalid qos specification' >&2; exit 1")
    found = findings(doctor("local/debug", "--json"))
    assert "Invalid qos specification" in found["submit options"]["says"]
    owned = findings(doctor("local/debug", "launch.slurm.extra.nodes=4", "--json"))
    assert "launch.num_nodes" in owned["config"]["says"]
    absent = findings(doctor("local/debug", "launch.python=/no/such/python", "--json"))
    assert "launch.python = /no/such/python: must be an executable file" in absent["submit options"]["says"]
