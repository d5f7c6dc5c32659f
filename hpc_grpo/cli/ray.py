"""The command `ray`: run Ray's command line on the Ray of a run, with the run's token."""

from __future__ import annotations

import os
import sys

import click

from hpc_grpo.cli.options import RUN, echo, open_run
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.lock import read_lock_owner
from hpc_grpo.run.source import own_command

_OF_THE_RUN = {
    "start": "hpc-grpo train, submit, pod and host start the Ray of a run",
    "stop": "it would end every Ray of yours on this machine: hpc-grpo stop RUN ends only this run",
    "up": "a run starts its own Ray",
    "down": "hpc-grpo stop RUN ends the run",
}
_ASK_DASHBOARD = ("job", "list", "get", "summary", "logs")
"""Ray's commands that its dashboard answers."""


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
