"""Steps of the job on one of its nodes, and the environments in which Slurm's commands do what they are told."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_grpo.launch.place.topology import Topology


def step_command(topology: Topology, index: int, command: list[str]) -> list[str]:
    """Wrap `command` so that it runs on node `index`."""
    if topology.source == "local":
        return command
    gpus = topology.gpus_per_node
    return [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={topology.nodes[index]}",
        "--overlap",  # without it the step waits until the batch step's CPUs are free: for ever
        "--mem=0",  # else a second step finds the job's memory taken
        f"--cpus-per-task={topology.num_cpus[index]}",  # srun has not inherited it since 22.05
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        "--export=ALL",
        "--cpu-bind=none",
        "--unbuffered",
        "--disable-status",  # else a first Ctrl+C only prints the step's state
        "--job-name=hpc-grpo-node",
        *command,
    ]


_STEP_LEAKS: dict[str, str] = {
    "SLURM_CPU_BIND": "pins every process to one core",
    "SLURM_CPU_BIND_*": "pins every process to one core",
    "SLURM_MEM_BIND": "binds all memory of the node's processes to one domain",
    "SLURM_MEM_BIND_*": "binds all memory of the node's processes to one domain",
    "SLURM_MEM_PER_*": "contradicts --mem=0",
    "SLURM_CPUS_PER_*": "contradicts --cpus-per-task",
    "SRUN_CPUS_PER_TASK": "contradicts --cpus-per-task",
    "SLURM_TRES_PER_TASK": "contradicts --cpus-per-task",
    "SLURM_THREADS_PER_CORE": "contradicts --cpus-per-task, which counts all threads of the allocation",
    "SLURM_HINT": "contradicts --cpu-bind, and nomultithread --cpus-per-task",
    "SLURM_NTASKS_PER_*": "contradicts --ntasks=1",
    "SLURM_DISTRIBUTION": "spreads tasks; arbitrary wants a host file",
    "SLURM_DIST_PLANESIZE": "spreads tasks",
    "SLURM_GPUS": "of all nodes: a step on one node would ask for as many",
    "SLURM_GPUS_PER_TASK": "of one of the job's tasks: ours has the whole node",
    "SLURM_GPUS_PER_SOCKET": "asks beside --gpus-per-node",
    "SLURM_GPU_BIND": "hides GPUs of the node from its one task",
    "SLURM_GRES": "asks beside --gpus-per-node",
    "SLURM_STEP_GRES": "asks beside --gpus-per-node",
    "SLURM_EXCLUSIVE": "contradicts --overlap",
    "SLURM_TIMELIMIT": "ends the step before the job",
    "SLURM_LABELIO": "writes a task's number before every line of its reports",
    "SLURM_STDINMODE": "takes away the pipe that the step is told through",
    "SLURM_STDOUTMODE": "takes away the pipe that the step reports through",
}
"""What srun reads as options, from the job's environment -> why a step of ours must not have it.

A name that ends in `*` is a prefix. The command line wins over a variable of the same option, not over the others.
"""


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment srun itself needs, without what would change the step."""
    prefixes = tuple(name[:-1] for name in _STEP_LEAKS if name.endswith("*"))
    return {key: value for key, value in environ.items() if key not in _STEP_LEAKS and not key.startswith(prefixes)}


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for sbatch: inside a job, that job's own settings would leak into the new one."""
    prefixes, needed = ("SLURM_", "SBATCH_", "SRUN_"), "SLURM_CONF"
    return {key: value for key, value in environ.items() if key == needed or not key.startswith(prefixes)}
