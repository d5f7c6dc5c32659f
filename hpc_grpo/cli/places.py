"""The commands for nodes without a scheduler: `pod` is the same on every pod, `host` has a command for each role."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import click

from hpc_grpo.cli.options import CONFIG, OVERRIDES, STARTS_RUN, PlainGroup, echo
from hpc_grpo.cli.request import Request, load_request
from hpc_grpo.cli.train import start_training
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.freeze import is_over
from hpc_grpo.launch.place.base import refuse_hosts
from hpc_grpo.launch.place.joined.place import HEAD_VARIABLE, stop_here
from hpc_grpo.launch.place.joined.roles import Role, by_hand, find_role
from hpc_grpo.launch.place.joined.worker import Worker
from hpc_grpo.run.paths import RunDir


@click.command()
@CONFIG
@OVERRIDES
@STARTS_RUN
def pod(config_name: str, overrides: tuple[str, ...], accepts_changes: bool, driver: str) -> None:
    """Train on pods: the same command on each of them, in any order.

    Reads the head, its address and the number of pods from the environment: RAY_WORKER, HEAD_POD_ID and
    EXPECTED_WORKERS, or the variables of SkyPilot, dstack and RunPod's Instant Clusters. Workers stay until the run
    is over. They join again after a restart of the head or of themselves.
    """
    role = find_role(os.environ)
    request = _request(config_name, overrides, role)
    if role.is_head:
        _lead(request, accepts_changes, driver)
    _work(request, role)


@click.group(cls=PlainGroup)
def host() -> None:
    """Train on hosts that you start by hand: `head` on one host, `worker` on the others."""


@host.command()
@CONFIG
@OVERRIDES
@STARTS_RUN
def head(config_name: str, overrides: tuple[str, ...], accepts_changes: bool, driver: str) -> None:
    """Lead the run from this host. Waits for launch.num_nodes - 1 workers, then trains. Port: $RAY_HEAD_PORT."""
    _lead(_request(config_name, overrides, by_hand(os.environ)), accepts_changes, driver)


@host.command()
@CONFIG
@OVERRIDES
def worker(config_name: str, overrides: tuple[str, ...]) -> None:
    """Join the run from this host until the run is over, or Ctrl+C. Head: $RAY_HEAD_IP and $RAY_HEAD_PORT."""
    role = by_hand(os.environ)
    if not role.head:
        raise ConfigError("RAY_HEAD_IP is not set: export the head's address, as in RAY_HEAD_IP=192.168.1.100.")
    _work(_request(config_name, overrides, role), role)


@host.command()
@CONFIG
@OVERRIDES
def stop(config_name: str, overrides: tuple[str, ...]) -> None:
    """End the run's processes on this host. On the head, the whole run ends after its step and a checkpoint.

    On a worker, only this node leaves the run. The run continues if launch.min_nodes allows it.
    """
    request = _request(config_name, overrides, by_hand(os.environ))
    for line in stop_here(RunDir(request.config.run_path)):
        echo(line)


def _request(config_name: str, overrides: Sequence[str], role: Role) -> Request:
    """Load the config. Overrides on the command line win over the environment's number of nodes and port."""
    told = {"launch.num_nodes": role.num_nodes, "launch.port": role.port}
    from_role = [f"{key}={json.dumps(value)}" for key, value in told.items() if value is not None]
    request = load_request(config_name, [*from_role, *overrides])
    refuse_hosts(request.config.launch, "nodes join by themselves, each by its own command")
    is_given = any(override.startswith("launch.num_nodes=") for override in [*from_role, *overrides])
    if is_given or request.config.launch.num_nodes > 1 or role.default_nodes == 1:
        return request
    return load_request(config_name, [f"launch.num_nodes={role.default_nodes}", *from_role, *overrides])


def _lead(request: Request, accepts_changes: bool, driver: str) -> None:
    """Freeze the run and become its attempt, like `train`."""
    os.environ[HEAD_VARIABLE] = "1"
    start_training(request, accepts_changes=accepts_changes, driver=driver, is_restart=True)


def _work(request: Request, role: Role) -> None:
    os.environ.update(request.exported)
    config = request.config
    run = RunDir(config.run_path)
    sys.exit(Worker(run, role.head, config.launch.port, lambda: is_over(run, config)).serve())
