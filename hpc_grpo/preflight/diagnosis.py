"""The whole of `hpc-grpo doctor`: which checks run where."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.place.topology import Topology, detect
from hpc_grpo.preflight import login
from hpc_grpo.preflight.context import Context
from hpc_grpo.preflight.examination import NODES, examine
from hpc_grpo.preflight.findings import Group, failure, skipped
from hpc_grpo.preflight.folders import own_folder
from hpc_grpo.preflight.job import examine_in_job
from hpc_grpo.preflight.scheduler import ask_partitions


def diagnose(context: Context, asked_nodes: int | None, wait_min: float, tell: Callable[[str], None]) -> list[Group]:
    """Every group of findings that can be had from here, on `asked_nodes` nodes or, with None, on those at hand.

    Waits `wait_min` minutes at most for a job that examines nodes. Raises ConfigError where so many cannot be had.
    """
    try:
        topology = detect(context.environ)
    except LaunchError as error:
        return [Group(NODES, (failure("allocation", str(error), "leave this shell for a login node's"),))]
    num_nodes = max(asked_nodes or 1, context.launch.slurm.num_nodes)
    partitions = None if topology.source == "slurm" else ask_partitions()
    login_group = login.login_group(context, num_nodes, partitions)
    if partitions is None:
        return [login_group, *examine_here(_first(topology, asked_nodes), context)]
    if asked_nodes is None and partitions.is_absent:
        return [login_group, *examine_here(topology, context)]
    if asked_nodes is None:
        return [login_group, _not_examined("a login node: --nodes N examines N compute nodes in a short job")]
    if stopped := [f.check for f in login_group.findings if f.status == "failure" and f.check in login.NEEDED_BY_A_JOB]:
        return [login_group, _not_examined(f"no job was submitted; first mend: {', '.join(stopped)}")]
    os.environ.update(context.environ)  # a job starts with what a .sh config exports
    return [login_group, *examine_in_job(context, asked_nodes, wait_min, tell)]


def diagnose_in_job(context: Context) -> list[Group]:
    """What the job of --nodes is for: the nodes alone. Raises LaunchError outside an allocation."""
    return examine_here(detect(context.environ), context)


def examine_here(topology: Topology, context: Context) -> list[Group]:
    try:
        return examine(topology, context, own_folder(context.root))
    except OSError as error:
        fix = "look at the allocation by hand: srun --overlap hostname"
        return [Group(NODES, (failure("answers", f"no process could be started on the nodes: {error}", fix),))]


def _first(topology: Topology, num_nodes: int | None) -> Topology:
    if num_nodes is None:
        return topology
    if num_nodes > len(topology.nodes):
        raise ConfigError(
            f"--nodes {num_nodes}: job {topology.job_id} has {len(topology.nodes)} nodes. Give at most so many, or "
            f"leave the job and ask from a login node."
        )
    return replace(topology, nodes=topology.nodes[:num_nodes], num_cpus=topology.num_cpus[:num_nodes])


def _not_examined(why: str) -> Group:
    return Group(NODES, (skipped("nodes", why),))
