"""A ceiling on what the jobs of a run use together: each asks for no more walltime than is left of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.place import queue_of
from hpc_grpo.run.attempt import AttemptRecord


def node_hours_asked(launch: LaunchConfig) -> float:
    """What a job uses that goes on to its time limit."""
    return launch.num_nodes * launch.slurm.time_min / 60


def node_hours_used(attempts: Sequence[AttemptRecord], now: float) -> float:
    """What those attempts of a run, in order, that were Slurm jobs have used until `now` (unix seconds).

    One that was killed without a word counts until the next began, or its allocation ended: never too little.
    """
    jobs = [attempt for attempt in attempts if queue_of(attempt.source) is not None]
    latest = [*(following.started_at for _, following in pairwise(jobs)), now]
    seconds = (
        len(job.nodes) * max(0.0, _end(job, end) - job.started_at) for job, end in zip(jobs, latest, strict=False)
    )
    return sum(seconds) / 3600


def within_node_hours(launch: LaunchConfig, used: float) -> LaunchConfig:
    """`launch` asking for no more walltime than `used` node-hours leave of `launch.slurm.max_node_hours`.

    Raises ConfigError where that is too little for the nodes to come up.
    """
    slurm = launch.slurm
    if slurm.max_node_hours is None:
        return launch
    left_min = int((slurm.max_node_hours - used) * 60 / launch.num_nodes)
    if left_min * 60 < launch.bringup_deadline_s:
        raise ConfigError(
            f"The jobs of this run have taken {used:.1f} of launch.slurm.max_node_hours = {slurm.max_node_hours:g}: "
            f"too little is left for another job of {launch.num_nodes} node(s). Raise it to go on."
        )
    shorter = slurm.model_copy(update={"time_min": min(slurm.time_min, left_min)})
    return launch.model_copy(update={"slurm": shorter})


def _end(attempt: AttemptRecord, latest: float) -> float:
    if attempt.ended_at is not None:
        return attempt.ended_at
    return latest if attempt.ends_at is None else min(latest, attempt.ends_at)
