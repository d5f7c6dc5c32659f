"""The command that asks the Ray of a run, by Ray's own command line and with the run's token."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from hpc_grpo.cli.options import RUN, find_run
from hpc_grpo.errors import ConfigError

_OF_THE_RUN = {
    "start": "the run brings its Ray up itself: hpc-grpo train, submit, pod or host",
    "stop": "it ends every Ray of yours on this machine: hpc-grpo stop RUN ends this run",
    "up": "the run brings its Ray up itself",
    "down": "hpc-grpo stop RUN ends the run",
}


@click.command(context_settings={"ignore_unknown_options": True})
@RUN
@click.argument("words", nargs=-1, required=True, metavar="COMMAND...", type=click.UNPROCESSED)
def ray(run_name: str, words: tuple[str, ...]) -> NoReturn:
    """Run Ray's own command, such as `status`, on the Ray of a run that trains now: on a node of it."""
    from hpc_grpo.run.attempt import read_attempts
    from hpc_grpo.run.source import own_command

    if words[0] in _OF_THE_RUN:
        raise ConfigError(f"ray {words[0]} is not for the Ray of a run: {_OF_THE_RUN[words[0]]}.")
    run = find_run(run_name)
    attempts = read_attempts(run)
    if not attempts or attempts[-1].exit_kind != "running" or not attempts[-1].ray_address:
        raise ConfigError(f"No Ray of run {run.path.name} is up. `hpc-grpo status {run.path}` says where it stands.")
    found = {"RAY_ADDRESS": attempts[-1].ray_address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(run.secret)}
    command = [sys.executable, "-m", "ray.scripts.scripts", *words]
    if words[0] == "status":
        command = own_command("-m", "hpc_grpo.launch.agent.ray_program", "status", attempts[-1].ray_address)
    os.execve(command[0], command, {**os.environ, **found})


COMMANDS = (ray,)
