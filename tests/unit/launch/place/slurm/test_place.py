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
from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.agent.protocol import NodeSpec
from hpc_grpo.launch.place import find_place
from hpc_grpo.launch.place.base import Allocation, NodeResources
from hpc_grpo.launch.place.slurm import place
from hpc_grpo.launch.place.slurm.place import (
    SlurmPlace,
    allocation_command,
    gpus_of_a_step,
    step_command,
)
from hpc_grpo.launch.place.slurm.text import fields
from hpc_grpo.preflight.node_facts import gather
from hpc_grpo.run.attempt import AttemptRecord
from hpc_grpo.run.files import write_atomic, write_json_atomic
from hpc_grpo.run.lock import LockOwner
from hpc_grpo.run.paths import RunDir


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scontrol that answers as Slurm 22.05 does."""
    tool = tmp_path / "scontrol"
    tool.write_text(
        "#!/bin/bash\n"
        'if [[ "$2 $3" == "hostnames nid[001-002]" ]]; then printf "nid001\\nnid002\\n"; exit; fi\n'
        'echo "JobId=$3 JobName=x JobState=RUNNING NumNodes=2 NumCPUs=144 CPUs/Task=1"\n'
        'echo "   ReqNodeList=nid009 ExcNodeList=(null) NodeList=nid[001-002]"\n'
        'echo "   StartTime=2026-01-02T03:00:00 EndTime=2026-01-02T03:30:00 Deadline=N/A"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tool


def allocation_of(environ: dict[str, str]) -> Allocation:
    return find_place(environ).allocation()


def cpus_of_steps(environ: dict[str, str]) -> list[str]:
    steps = [find_place(environ).start_command(node, ["agent"]) for node in ("nid001", "nid002")]
    return [word for step in steps for word in step if word.startswith("--cpus-per-task")]


def test_an_allocation_gives_its_nodes_cpus_and_end(scontrol: Path) -> None:
    environ = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "nid[001-002]",
        "SLURM_JOB_CPUS_PER_NODE": "72(x2)",
        "SLURMD_NODENAME": "nid002",
    }
    found = allocation_of(environ)
    assert found.nodes == ("nid001", "nid002")
    assert cpus_of_steps(environ) == ["--cpus-per-task=72"] * 2
    assert (found.head, found.this_node, found.job_id) == ("nid001", "nid002", "17")
    assert found.ends_at == time.mktime((2026, 1, 2, 3, 30, 0, 0, 0, -1))


def test_the_end_is_known_whatever_form_the_user_wants_times_in(
    scontrol: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = 'end=2026-01-02T03:30:00; [[ $SLURM_TIME_FORMAT == standard ]] || end="02 Jan 03:30"\n'
    scontrol.write_text(
        scontrol.read_text().replace("bash\n", f"bash\n{form}").replace("EndTime=2026-01-02T03:30:00", "EndTime=$end")
    )
    monkeypatch.setenv("SLURM_TIME_FORMAT", "%d %b %H:%M")
    assert allocation_of({"SLURM_JOB_ID": "17"}).ends_at == time.mktime((2026, 1, 2, 3, 30, 0, 0, 0, -1))


def test_a_shell_outside_the_nodes_is_on_none_of_them(scontrol: Path) -> None:
    found = allocation_of({"SLURM_JOB_ID": "17", "SLURM_NODELIST": "nid[001-002]"})
    assert found.this_node is None


def test_a_step_without_the_counts_asks_slurm_for_them(scontrol: Path) -> None:
    environ = {"SLURM_JOB_ID": "17", "SLURM_NODELIST": "nid[001-002]"}
    assert cpus_of_steps(environ) == ["--cpus-per-task=72"] * 2


def test_a_shell_attached_to_one_node_finds_all_of_the_job(scontrol: Path) -> None:
    environ = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "nid002", "SLURMD_NODENAME": "nid002"}
    found = allocation_of(environ)
    assert (found.nodes, found.this_node) == (("nid001", "nid002"), "nid002")
    assert cpus_of_steps(environ) == ["--cpus-per-task=72"] * 2


def test_a_job_that_is_over_is_an_error_with_its_state(scontrol: Path) -> None:
    scontrol.write_text('#!/bin/bash\necho "JobId=17 JobState=COMPLETED NodeList=(null)"\n')
    with pytest.raises(LaunchError, match=r"has no nodes now \(state COMPLETED\)"):
        allocation_of({"SLURM_JOB_ID": "17"})


def test_a_shell_that_outlived_its_job_is_told_what_to_unset(scontrol: Path) -> None:
    """Editors and terminals keep the variables of the job in which they were started."""
    scontrol.write_text("#!/bin/bash\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    with pytest.raises(LaunchError, match=r"job 17, .*\(Slurm has forgotten it\).*unset SLURM_JOB_ID"):
        allocation_of({"SLURM_JOB_ID": "17", "SLURM_NODELIST": "n1"})


@pytest.mark.parametrize(
    ("asked", "gpus"),
    [
        ("TresPerNode=gres:gpu:4", None),  # --gpus-per-node: steps inherit it
        ("TresPerNode=gres/gpu:gh200:4", None),
        ("TresPerJob=gres:gpu:8", 4),  # --gpus
        ("TresPerJob=gres:gpu:8 TresPerNode=gres:gpu:4", 4),  # --gpus beside the script's --gpus-per-node
        ("TresPerTask=gres/gpu=1", 4),  # --ntasks-per-node=4 --gpus-per-task=1
        ("OverSubscribe=NO TresPerTask=cpu=2", 4),  # --exclusive: no GPU was asked for, all were granted
    ],
)
def test_a_step_asks_for_its_nodes_gpus_where_it_would_inherit_others(asked: str, gpus: int | None) -> None:
    untyped, both = "TRES=cpu=16,node=2,gres/gpu=8", "ReqTRES=node=2 AllocTRES=node=2,gres/gpu=8,gres/gpu:gh200=8"
    for shown in (untyped, both, "TRES=cpu=16,node=2,gres/gpu:gh200=8"):
        assert gpus_of_a_step(fields(f"JobId=17 {shown}\n   {asked}\n"), 2) == gpus


def test_fewer_gpus_than_nodes_are_refused_in_words() -> None:
    with pytest.raises(LaunchError, match=r"1 GPUs on 2 nodes\. Ask for GPUs by node, with --gpus-per-node"):
        gpus_of_a_step(fields("JobId=17 TRES=cpu=16,node=2,gres/gpu=1 TresPerJob=gres:gpu:1"), 2)


def test_a_job_without_gpus_asks_for_none() -> None:
    assert gpus_of_a_step(fields("JobId=17 TRES=cpu=16,node=2 TresPerJob=license:gpu_tool:1"), 2) is None


def test_resources_are_those_of_the_allocation() -> None:
    environ = {"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "72", "SLURM_GPUS_ON_NODE": "4"}
    assert SlurmPlace(environ).node_resources() == NodeResources(72, 4)
    for asked, gpus in {"2": 2, "gh200:1,a100:1": 2, "4": 4}.items():
        assert SlurmPlace({**environ, "SLURM_GPUS_PER_NODE": asked}).node_resources().num_gpus == gpus
    assert SlurmPlace({"SLURM_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": "2,3"}).node_resources().num_gpus == 2
    assert SlurmPlace({"SLURM_JOB_ID": "1"}).node_resources().num_gpus == 0


def test_a_step_has_the_cpus_that_it_asked_for_if_slurm_counts_fewer() -> None:
    """As Slurm 22.05 does on the first node of `sbatch -N2 -n3 -c2`."""
    environ = {"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "1", "SLURM_CPUS_PER_TASK": "4"}
    assert SlurmPlace(environ).node_resources().num_cpus == 4


@pytest.mark.parametrize(("counts", "is_even"), [((3, 1), False), ((2, 2), True), ((4, 0), False)])
def test_gpus_that_slurm_spread_unevenly_are_refused_in_words(
    scontrol: Path, counts: tuple[int, int], is_even: bool
) -> None:
    nodes = [f"     Nodes=nid00{node} CPU_IDs=0-3 Mem=100 GRES=gpu:gh200:{n}(IDX:0)" for node, n in enumerate(counts)]
    shown = "\n".join(["   TRES=cpu=16,node=2,gres/gpu=4", "   TresPerJob=gres:gpu:4", *nodes])
    scontrol.write_text(f"{scontrol.read_text()}cat <<'end'\n{shown}\nend\n")
    if is_even:
        assert allocation_of({"SLURM_JOB_ID": "17"}).nodes == ("nid001", "nid002")
    else:
        with pytest.raises(LaunchError, match=r"unequal numbers of GPUs: .*Ask for GPUs by node"):
            allocation_of({"SLURM_JOB_ID": "17"})


@pytest.mark.parametrize(
    ("cpus", "shown", "gpus"),
    [
        ("9999", "", 2),
        ("0", "", 0),
        ("9999", "CPUAlloc=9999 CPUTot=19998", 0),
        ("9999", "CPUEfctv=9999 CPUTot=10000", 2),
    ],
    ids=["whole", "part", "half of the threads", "without the cores that Slurm keeps"],
)
def test_on_a_whole_node_of_a_site_without_gres_all_gpus_count(
    cpus: str, shown: str, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a part of a node they may be another job's."""
    for name, printed in {"nvidia-smi": "GPU 0: H100\nGPU 1: H100", "scontrol": f"NodeName=x {shown}"}.items():
        # Without --all scontrol does not find nodes of hidden partitions.
        (tmp_path / name).write_text(f"#!/bin/sh\n[ $1 != show ] || exit 1\necho '{printed}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable, value in {"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": cpus}.items():
        monkeypatch.setenv(variable, value)
    assert SlurmPlace().node_resources().num_gpus == gpus
    assert gather(NodeSpec("x", "t", "", "", "", "", None, True, None, 1.0)).num_gpus == gpus, "the doctor's"


def test_an_answer_of_slurm_is_kept_and_a_failure_is_not(scontrol: Path) -> None:
    place = find_place({"SLURM_JOB_ID": "17"})
    answering = scontrol.read_text()
    scontrol.write_text("#!/bin/bash\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    with pytest.raises(LaunchError, match="Unable to contact"):
        place.allocation()
    scontrol.write_text(answering)
    found = place.allocation()
    scontrol.unlink()
    assert place.allocation() == found
    assert place.start_command("nid002", ["agent"])[-1] == "agent"


def test_a_step_runs_on_its_node_with_all_of_its_cpus(scontrol: Path) -> None:
    place = find_place({"SLURM_JOB_ID": "17", "SLURM_JOB_CPUS_PER_NODE": "8,16"})
    assert {"srun", "--nodelist=nid002", "--cpus-per-task=16"} <= set(place.start_command("nid002", ["agent"]))


def test_of_a_heterogeneous_job_its_own_part_counts(scontrol: Path) -> None:
    own = "JobId=17 HetJobOffset=0 NumCPUs=4 NodeList=nid[001-002]"
    other = "JobId=18 HetJobOffset=1 NumCPUs=8 NodeList=nid[003-009]"
    scontrol.write_text(scontrol.read_text().replace('echo "JobId=$3', f'printf "{own}\\n\\n{other}\\n"; exit\necho "'))
    assert allocation_of({"SLURM_JOB_ID": "17"}).nodes == ("nid001", "nid002")


def test_a_lost_node_is_told_by_what_its_step_said_last() -> None:
    place = SlurmPlace({"SLURM_JOB_ID": "17"})
    assert place.is_node_failure("exit code 1: srun: error: Node failure on nid002")
    assert not place.is_node_failure("exit code 137: Killed")


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
    environ = dict.fromkeys([*inherited, *needed], "1")
    assert list(SlurmPlace(environ).start_environment(environ)) == needed


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
    return CliRunner().invoke(main, ["cluster", "shell", *words], catch_exceptions=False)


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


def test_a_shell_has_the_options_of_a_job_also_zero() -> None:
    """--mem=0 is all memory of the node."""
    extra = {"mem": 0, "exclusive": True, "requeue_hold": False, "requeue_reason": None}
    launch = LaunchConfig.model_validate({"slurm": {"extra": extra}})
    command = allocation_command(launch)
    options = command[: command.index("srun")]
    assert {"--mem=0", "--exclusive"} <= {*options} and not any("requeue" in option for option in options)


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
