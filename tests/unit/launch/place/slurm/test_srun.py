from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpc_grpo.cli import main
from hpc_grpo.config import LaunchConfig
from hpc_grpo.launch.place.slurm import place
from hpc_grpo.launch.place.slurm.place import allocation_command, step_command, step_environment
from hpc_grpo.run.attempt import AttemptRecord
from hpc_grpo.run.files import write_atomic, write_json_atomic
from hpc_grpo.run.lock import LockOwner
from hpc_grpo.run.paths import RunDir

STEP = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--cpu-bind=none", "--export=ALL"]


@pytest.mark.parametrize(("gpus", "words"), [(None, []), (4, ["--gpus-per-node=4"])])
def test_a_step_overlaps_takes_no_memory_and_names_its_cpus_and_gpus(gpus: int | None, words: list[str]) -> None:
    command = step_command("b", 16, gpus, ["agent"])
    assert command[: len(STEP)] == STEP
    assert {"--nodelist=b", "--cpus-per-task=16"} <= set(command)
    assert [word for word in command if "gpus" in word] == words
    assert command[-1] == "agent"


def test_ctrl_c_reaches_what_a_step_runs_at_the_first_time() -> None:
    """A shell that salloc left on the login node runs the supervisor in such a step."""
    command = step_command("a", 8, None, ["hpc-grpo", "attempt"])
    assert "--disable-status" in command[: command.index("hpc-grpo")]


def test_a_step_does_not_inherit_what_contradicts_its_options() -> None:
    inherited = ["SLURM_MEM_PER_CPU", "SLURM_CPU_BIND_LIST", "SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_HINT"]
    inherited += ["SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_CPUS_PER_GPU", "SLURM_STEP_GRES"]
    inherited += ["SLURM_THREADS_PER_CORE", "SLURM_LABELIO", "SLURM_TIMELIMIT"]
    needed = ["SLURM_JOB_ID", "SLURM_JOB_CPUS_PER_NODE", "SLURM_CPUS_ON_NODE", "SLURM_GPUS_ON_NODE", "SLURMD_NODENAME"]
    needed += ["SLURM_GPUS_PER_NODE", "SLURM_CONF", "SLURM_NTASKS", "PATH"]
    assert list(step_environment(dict.fromkeys([*inherited, *needed], "1"))) == needed


def test_every_variable_that_stays_behind_has_a_reason() -> None:
    assert all(reason.strip() for reason in place._STEP_LEAKS.values())


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """What the process would have become; it ends there."""
    seen: list[tuple[list[str], dict[str, str]]] = []

    def execvpe(_file: str, argv: list[str], environ: dict[str, str]) -> None:
        seen.append((argv, environ))
        raise SystemExit(0)

    monkeypatch.setattr(place.os, "execvpe", execvpe)
    return seen


def shell(*words: str) -> Result:
    return CliRunner().invoke(main, ["shell", *words], catch_exceptions=False)


def running(folder: Path, source: Any = "slurm", beat_age_s: float = 1.0) -> None:
    run = RunDir(folder)
    run.create()
    write_atomic(run.config, "run: {}\n")
    record = AttemptRecord(1, "77", source, ["nid004", "nid007"], time.time(), None, 5)
    run.attempt(1, "77").mkdir(parents=True)
    record.save(run.attempt(1, "77"))
    write_json_atomic(run.holder, asdict(LockOwner("nid004", 5, 1, "77", 1, time.time() - beat_age_s)))


def test_options_become_an_allocation_with_a_shell_on_its_first_node(became: list[Any]) -> None:
    options = ["--nodes", "2", "--time", "30", "--partition", "p", "--account", "a", "--gpus-per-node", "4"]
    assert shell(*options, "--sbatch", "qos=debug", "--sbatch", "exclusive").exit_code == 0
    argv, _ = became[0]
    wanted = ["--nodes=2", "--ntasks-per-node=1", "--time=30", "--partition=p", "--account=a", "--gpus-per-node=4"]
    at = argv.index("srun")
    assert argv[:at] == ["salloc", "--job-name=hpc-grpo-shell", *wanted, "--qos=debug", "--exclusive"]
    assert argv[at : at + len(STEP)] == STEP
    assert argv[at + len(STEP) :][:5] == ["--whole", "--relative=0", "--pty", "bash", "-lc"]
    assert f"export PATH={Path(sys.executable).parent}:$PATH" in argv[-1].splitlines()


def test_a_config_gives_what_the_options_do_not(became: list[Any], tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"  # a site's config: nothing about a run
    site.write_text("launch: {modules: [cuda], slurm: {partition: workq, gpus_per_node: 4, time_min: 99}}\n")
    shell("--config", str(site), "--nodes", "3", "--time", "5")
    argv, _ = became[0]
    assert {"--partition=workq", "--gpus-per-node=4", "--nodes=3", "--time=5"} <= set(argv)
    reset, load = argv[-1].splitlines()[:2]
    assert (reset, load.startswith("module load cuda || ")) == ("module reset", True)


def test_the_time_is_given_as_to_slurm(became: list[Any]) -> None:
    shell("--time", "1-02:30")
    assert "--time=1590" in became[0][0]
    result = shell("--time", "soon")
    assert (result.exit_code, "--time = 'soon' must be" in result.stderr, len(became)) == (78, True, 1)


def test_another_allocations_settings_stay_behind(became: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1000")
    monkeypatch.setenv("SLURM_CPU_BIND", "quiet,mask_cpu:0x1")
    shell("--nodes", "1")
    assert [name for name in became[0][1] if name.startswith("SLURM_")] == []


def test_a_light_installation_gives_a_shell_with_the_one_of_the_jobs() -> None:
    command = allocation_command(LaunchConfig(python="/proj/env/bin/python"))
    assert "export PATH=/proj/env/bin:$PATH" in command[-1].splitlines()


def test_a_shell_on_a_node_of_a_run(became: list[Any], tmp_path: Path) -> None:
    running(tmp_path / "r")
    for words in (["--node", "nid007"], []):
        shell(str(tmp_path / "r"), *words)
    for (argv, _), node in zip(became, ["nid007", "nid004"], strict=True):
        assert argv[: len(STEP) + 4] == [*STEP, "--whole", "--jobid=77", f"--nodelist={node}", "--pty"]


def test_a_shell_on_a_node_of_a_run_has_the_python_of_its_jobs(became: list[Any], tmp_path: Path) -> None:
    running(tmp_path / "r")
    shell(str(tmp_path / "r"))
    write_atomic(RunDir(tmp_path / "r").config, "launch: {python: /proj/my env/bin/python}\n")
    shell(str(tmp_path / "r"))
    this, named = (argv[-3:] for argv, _ in became)
    assert this == ["bash", "-lc", f"export PATH={Path(sys.executable).parent}:$PATH\nexec bash"]
    assert named == ["bash", "-lc", "export PATH='/proj/my env/bin':$PATH\nexec bash"]


def test_a_shell_that_cannot_be_had_is_an_error_that_says_why(became: list[Any], tmp_path: Path) -> None:
    running(tmp_path / "r")
    running(tmp_path / "silent", beat_age_s=600.0)
    running(tmp_path / "here", source="local")
    told = {
        (str(tmp_path / "r"), "--node", "nid005"): "--node = 'nid005' must be a node of job 77: nid004, nid007.",
        (str(tmp_path / "silent"),): "No attempt of run silent is running now, so it has no nodes.",
        (str(tmp_path / "here"),): "Run here runs on nid004 without Slurm: log in there instead.",
        (str(tmp_path / "r"), "--nodes", "2"): "RUN has its nodes already",
        ("--node", "nid004"): "give RUN too",
        ("--sbatch", "time=3"): "launch.slurm.extra must not hold time",
    }
    for words, message in told.items():
        result = shell(*words)
        assert (result.exit_code, message in result.stderr) == (78, True), (words, result.stderr)
    assert became == []


def test_a_shell_without_slurm_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = shell("--nodes", "1")
    assert result.exit_code == 1
    assert "no salloc on PATH" in result.stderr
