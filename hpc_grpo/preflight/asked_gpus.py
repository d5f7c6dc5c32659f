"""Whether what a config asks Slurm for has the GPUs that its learners and engines will reserve."""

from __future__ import annotations

from math import inf

from hpc_grpo.config import Config, SlurmConfig
from hpc_grpo.config.resources import check_fits, node_demand
from hpc_grpo.errors import ConfigError


def refuse_too_few_gpus(config: Config) -> None:
    """Raise ConfigError where a node of the job could not hold its learners and engines.

    Not judged: GPUs asked for by `launch.slurm.extra`, and the CPUs of a node, which Slurm rounds up to whole cores.
    """
    slurm = config.launch.slurm
    if config.placement.gpus == "none" or _extra_brings_gpus(slurm):
        return
    demand = node_demand(config, with_gpus=True)
    if slurm.gpus_per_node:
        place = f"launch.slurm.gpus_per_node = {slurm.gpus_per_node}: a node of the job"
        check_fits(config, place, demand, num_gpus=slurm.gpus_per_node, num_cpus=inf)
    elif config.model.device == "cuda":
        raise ConfigError(
            f"model.device = cuda, but launch.slurm.gpus_per_node = 0 asks Slurm for no GPUs. Learners and engines of "
            f"a node need {demand.num_gpus}: set launch.slurm.gpus_per_node to that. Where "
            f"whole nodes come with theirs, set launch.slurm.extra.exclusive=true; on CPUs, model.device=cpu."
        )


def _extra_brings_gpus(slurm: SlurmConfig) -> bool:
    """Whether an option of sbatch beside `gpus_per_node` may say how many: --gres, --gpus…, --tres…, --exclusive."""
    return any(key in ("gres", "exclusive") or key.startswith(("gpus", "tres")) for key in slurm.extra)
