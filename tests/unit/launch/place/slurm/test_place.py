from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.place import find_place
from hpc_grpo.launch.place.base import Allocation, NodeResources
from hpc_grpo.launch.place.slurm.place import SlurmPlace, gpus_of_a_step
from hpc_grpo.launch.place.slurm.text import fields


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


def test_an_allocation_gives_its_nodes_cpus_and_end(scontrol: Path) -> None:
    environ = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "nid[001-002]",
        "SLURM_JOB_CPUS_PER_NODE": "72(x2)",
        "SLURMD_NODENAME": "nid002",
    }
    found = allocation_of(environ)
    assert found.nodes == ("nid001", "nid002")
    assert found.num_cpus == (72, 72)
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
    assert allocation_of({"SLURM_JOB_ID": "17", "SLURM_NODELIST": "nid[001-002]"}).num_cpus == (72, 72)


def test_a_shell_attached_to_one_node_finds_all_of_the_job(scontrol: Path) -> None:
    environ = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "nid002", "SLURMD_NODENAME": "nid002"}
    found = allocation_of(environ)
    assert (found.nodes, found.num_cpus, found.this_node) == (("nid001", "nid002"), (72, 72), "nid002")


def test_a_job_that_is_over_is_an_error_with_its_state(scontrol: Path) -> None:
    scontrol.write_text('#!/bin/bash\necho "JobId=17 JobState=COMPLETED NodeList=(null)"\n')
    with pytest.raises(LaunchError, match=r"has no nodes now \(state COMPLETED\)"):
        allocation_of({"SLURM_JOB_ID": "17"})


def test_scontrols_own_words_are_in_the_error(scontrol: Path) -> None:
    scontrol.write_text("#!/bin/bash\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    with pytest.raises(LaunchError, match="Invalid job id specified"):
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
    with pytest.raises(LaunchError, match=r"1 GPUs on 2 nodes; ask by node, with --gpus-per-node"):
        gpus_of_a_step(fields("JobId=17 TRES=cpu=16,node=2,gres/gpu=1 TresPerJob=gres:gpu:1"), 2)


def test_a_job_without_gpus_asks_for_none() -> None:
    assert gpus_of_a_step(fields("JobId=17 TRES=cpu=16,node=2 TresPerJob=license:gpu_tool:1"), 2) is None


def test_resources_are_those_of_the_allocation() -> None:
    environ = {"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "72", "SLURM_GPUS_ON_NODE": "4"}
    assert SlurmPlace(environ).node_resources() == NodeResources(72, 4)
    assert SlurmPlace({"SLURM_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": "2,3"}).node_resources().num_gpus == 2
    assert SlurmPlace({"SLURM_JOB_ID": "1"}).node_resources().num_gpus == 0


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
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{printed}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    environ = {"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": cpus}
    assert SlurmPlace(environ).node_resources().num_gpus == gpus


def test_an_answer_of_slurm_is_kept_and_a_failure_is_not(scontrol: Path) -> None:
    place = find_place({"SLURM_JOB_ID": "17"})
    answering = scontrol.read_text()
    scontrol.write_text("#!/bin/bash\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    with pytest.raises(LaunchError, match="Unable to contact"):
        place.allocation()
    scontrol.write_text(answering)
    found = place.allocation()
    scontrol.unlink()
    assert place.allocation() is found
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
