"""The commands on a run's nodes: a shell on them, and Ray's own command line on the Ray of a run, with its token."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import click

from hpc_grpo.cli.options import RUN, complete, echo, open_run, slurm_overrides, slurm_time
from hpc_grpo.cli.request import load_request
from hpc_grpo.config import load_launch
from hpc_grpo.config.yaml_text import read_yaml
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.place import queue_of
from hpc_grpo.launch.place.slurm.place import allocation_command, attach_command, become
from hpc_grpo.report.status import read_records
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.lock import read_lock_owner
from hpc_grpo.run.source import own_command

_FOR_A_SHELL = ("launch.slurm.time_min=60", "launch.num_nodes=1")
"""These override the config, whose time and nodes are for training."""

_OF_THE_RUN = {
    "start": "hpc-grpo train, submit, pod and host start the Ray of a run",
    "stop": "it would end every Ray of yours on this machine: hpc-grpo stop RUN ends only this run",
    "up": "a run starts its own Ray",
    "down": "hpc-grpo stop RUN ends the run",
}
_ASK_DASHBOARD = ("job", "list", "get", "summary", "logs")
"""Ray's commands that its dashboard answers."""


@click.command()
@click.argument("run_name", metavar="[RUN]", required=False, shell_complete=complete("runs"))
@click.option("--node", metavar="NAME", help="A node of RUN's job; default: the first.")
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Nodes to allocate; default: 1.")
@click.option(
    "--time", type=slurm_time, metavar="TIME", help="90 (minutes), 24:00:00, 1-12:30, as for salloc. Default: 60."
)
@click.option("--partition")
@click.option("--account")
@click.option("--gpus", "--gpus-per-node", "gpus_per_node", type=click.IntRange(0), metavar="N")
@click.option("--cpus-per-node", type=click.IntRange(1), metavar="N")
@click.option("--sbatch", multiple=True, metavar="KEY=VALUE", help="A further option of Slurm, such as qos=debug.")
@click.option(
    "--config", "optional_config", metavar="CONFIG", help="Take the defaults of these options from its launch section."
)
def shell(run_name: str | None, node: str | None, optional_config: str | None, **options: Any) -> None:
    """Get a shell on a compute node: on new nodes, or on a node of the job that trains RUN.

    Without RUN: allocates nodes for interactive use, with modules and set-up lines of --config. In this shell,
    `hpc-grpo train CONFIG` uses all nodes. Leaving the shell releases the nodes.
    """
    overrides = slurm_overrides(options)
    if run_name is None:
        if node is not None:
            raise ConfigError("--node names a node of a running job: give RUN too. To allocate nodes, use --nodes N.")
        words = [*_FOR_A_SHELL, *overrides]
        if optional_config is not None and optional_config.endswith(".sh"):
            request = load_request(optional_config, words)
            os.environ.update(request.exported)
            launch = request.config.launch
        else:  # the config may have only a launch section; without a config, the defaults
            launch = load_launch(optional_config, words)
        become(allocation_command(launch), os.environ)
    if overrides or optional_config:
        raise ConfigError("RUN has its nodes already. Give RUN, or options for an allocation, but not both.")
    run = open_run(run_name)
    records = read_records(run)
    attempt = records.newest
    if attempt is None or not records.is_running(attempt, time.time()):
        raise ConfigError(
            f"No attempt of run {run.name} is running now, so it has no nodes. "
            f"`hpc-grpo status {run.path}` says where it stands."
        )
    if queue_of(attempt.source) is None:
        raise ConfigError(f"Run {run.name} runs on {attempt.nodes[0]} without Slurm: log in there instead.")
    if node not in (None, *attempt.nodes):
        raise ConfigError(f"--node = {node!r} must be a node of job {attempt.job_id}: {', '.join(attempt.nodes)}.")
    python = (read_yaml(run.config).get("launch") or {}).get("python")  # another version may have written the config
    become(attach_command(attempt.job_id, node or attempt.nodes[0], python), os.environ)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@RUN
@click.argument("words", nargs=-1, required=True, metavar="COMMAND...", type=click.UNPROCESSED)
def ray(run_name: str, words: tuple[str, ...]) -> None:
    """Run a command of Ray, such as `status`, on the Ray of a running run. Call it on a node of the run.

    `dashboard` prints the address of Ray's dashboard.
    """
    if words[0] in _OF_THE_RUN:
        raise ConfigError(f"ray {words[0]} is not for the Ray of a run: {_OF_THE_RUN[words[0]]}.")
    run = open_run(run_name)
    attempt = next(reversed(read_attempts(run)), None)
    if attempt is None or attempt.exit_kind != "running" or not attempt.ray_address:
        raise ConfigError(f"No Ray of run {run.name} is up. `hpc-grpo status {run.path}` says where it stands.")
    address, head = attempt.ray_dashboard, attempt.nodes[0]
    if (words == ("dashboard",) or words[0] in _ASK_DASHBOARD) and not address:
        raise ConfigError(
            f"`ray {words[0]}` needs Ray's dashboard, and run {run.name} has none: start the run with "
            f"launch.ray_dashboard=true."
        )
    if words == ("dashboard",):
        port = address.rpartition(":")[2]
        echo(f"http://{address} on {head}; the dashboard asks for the token in {run.secret}")
        echo(f"From another machine: ssh -L {port}:{address} {head}, then open http://127.0.0.1:{port} there.")
        return
    found = {"RAY_ADDRESS": attempt.ray_address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(run.secret)}
    if words[0] in _ASK_DASHBOARD:
        owner = read_lock_owner(run)
        if owner is None or not owner.is_on_this_host:  # another program may listen at this address here
            raise ConfigError(f"`ray {words[0]}` asks Ray's dashboard on the loopback of {head}. Call it there.")
        found["RAY_API_SERVER_ADDRESS"] = f"http://{address}"
    command = [sys.executable, "-m", "ray.scripts.scripts", *words]
    if words[0] == "status":
        command = own_command("-m", "hpc_grpo.launch.agent.ray_program", "status", attempt.ray_address)
    os.execve(command[0], command, {**os.environ, **found})
