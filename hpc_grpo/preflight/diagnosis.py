"""The whole of `hpc-grpo doctor`: which checks run where."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_grpo.config import LaunchConfig
from hpc_grpo.config.request import load_request
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.place.topology import Topology, detect
from hpc_grpo.preflight import login
from hpc_grpo.preflight.context import Context
from hpc_grpo.preflight.examination import NODES, examine
from hpc_grpo.preflight.findings import Group, failure, skipped
from hpc_grpo.preflight.folders import own_folder
from hpc_grpo.preflight.job import examine_in_job
from hpc_grpo.preflight.scheduler import ask_partitions


@dataclass(frozen=True)
class Wishes:
    """What the user asked for; `num_nodes` None: those at hand."""

    config_name: str | None
    overrides: Sequence[str]
    num_nodes: int | None
    wait_min: float


def make_context(wishes: Wishes, environ: Mapping[str, str]) -> Context:
    """The config, or why there is none; a config that does not load is a finding, no error."""
    if wishes.config_name is None:
        return Context(None, LaunchConfig(), environ)
    try:
        request = load_request(wishes.config_name, wishes.overrides)
    except ConfigError as error:
        return Context(None, LaunchConfig(), environ, str(error))
    return Context(request.config, request.config.launch, {**environ, **request.environment})


def diagnose(wishes: Wishes, environ: Mapping[str, str], tell: Callable[[str], None]) -> list[Group]:
    """Every group of findings that can be had from here. Raises ConfigError for a wish that cannot be."""
    context = make_context(wishes, environ)
    try:
        topology = detect(environ)
    except LaunchError as error:
        return [Group(NODES, (failure("allocation", str(error), "leave this shell for a login node's"),))]
    num_nodes = max(wishes.num_nodes or 1, context.launch.slurm.num_nodes)
    partitions = None if topology.source == "slurm" else ask_partitions()
    login_group = login.login_group(context, num_nodes, partitions)
    if partitions is None:
        return [login_group, *examine_here(_first(topology, wishes.num_nodes), context)]
    if wishes.num_nodes is None and partitions.is_absent:
        return [login_group, *examine_here(topology, context)]
    if wishes.num_nodes is None:
        return [login_group, _not_examined("a login node: --nodes N examines N compute nodes in a short job")]
    if stopped := [f.check for f in login_group.findings if f.status == "failure" and f.check in login.NEEDED_BY_A_JOB]:
        return [login_group, _not_examined(f"no job was submitted; first mend: {', '.join(stopped)}")]
    os.environ.update(context.environ)  # a job starts with what a .sh config exports
    return [login_group, *examine_in_job(context, wishes.num_nodes, wishes.wait_min, tell)]


def diagnose_in_job(wishes: Wishes, environ: Mapping[str, str]) -> list[Group]:
    """What the job of --nodes is for: the nodes alone. Raises LaunchError outside an allocation."""
    return examine_here(detect(environ), make_context(wishes, environ))


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
