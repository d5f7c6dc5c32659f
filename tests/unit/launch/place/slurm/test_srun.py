from __future__ import annotations

from hpc_grpo.launch.place.slurm import srun as steps
from hpc_grpo.launch.place.topology import Topology


def test_a_step_overlaps_takes_no_memory_and_names_its_cpus() -> None:
    allocation = Topology("slurm", "17", ("a", "b"), (8, 16), "a")
    command = steps.step_command(allocation, 1, ["agent"])
    assert command[0] == "srun"
    assert {"--nodelist=b", "--overlap", "--mem=0", "--cpus-per-task=16", "--cpu-bind=none"} <= set(command)
    assert command[-1] == "agent"
    local = Topology("local", "l", ("a",), (8,), "a")
    assert steps.step_command(local, 0, ["agent"]) == ["agent"]


def test_ctrl_c_reaches_what_a_step_runs_at_the_first_time() -> None:
    """A shell that salloc left on the login node runs the supervisor in such a step."""
    allocation = Topology("slurm", "17", ("a", "b"), (8, 16), None)
    command = steps.step_command(allocation, 0, ["hpc-grpo", "attempt"])
    assert "--disable-status" in command[: command.index("hpc-grpo")]


def test_a_step_does_not_inherit_what_contradicts_its_options() -> None:
    inherited = ["SLURM_MEM_PER_CPU", "SLURM_CPU_BIND_LIST", "SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_HINT"]
    inherited += ["SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_CPUS_PER_GPU", "SLURM_STEP_GRES"]
    inherited += ["SLURM_THREADS_PER_CORE", "SLURM_LABELIO", "SLURM_TIMELIMIT"]
    needed = ["SLURM_JOB_ID", "SLURM_JOB_CPUS_PER_NODE", "SLURM_CPUS_ON_NODE", "SLURM_GPUS_ON_NODE", "SLURMD_NODENAME"]
    needed += ["SLURM_GPUS_PER_NODE", "SLURM_CONF", "SLURM_NTASKS", "PATH"]
    assert list(steps.step_environment(dict.fromkeys([*inherited, *needed], "1"))) == needed


def test_every_leak_has_a_reason() -> None:
    assert all(reason.strip() for reason in steps._STEP_LEAKS.values())


def test_a_submission_from_inside_a_job_carries_nothing_of_it() -> None:
    environ = {"SLURM_MEM_PER_CPU": "100", "SBATCH_X": "1", "SRUN_X": "1", "SLURM_CONF": "/c", "PATH": "/bin"}
    assert steps.submission_environment(environ) == {"SLURM_CONF": "/c", "PATH": "/bin"}
