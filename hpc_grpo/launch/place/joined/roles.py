"""Which node of a run this is, and where its head is: the conventions of providers and scripts.

Each row of CONVENTIONS is one convention, with its source. The first convention with a variable that is set applies.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.place.local import is_own_address

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Role:
    """This node's role in the run.

    `num_nodes` and `port` come from the environment if it sets them, else from the config. Workers dial `head`, a name
    or address; "" if a head does not need it. `default_nodes` replaces `launch.num_nodes: 1` of a config.
    """

    is_head: bool
    head: str
    num_nodes: int | None = None
    port: int | None = None
    default_nodes: int = 1


def _runpod(environ: Environ) -> Role:
    flag = environ.get("RAY_WORKER", "") or "0"
    if flag not in ("0", "1"):
        raise ConfigError(f"RAY_WORKER = {flag!r} must be 1 on a worker, and 0 or unset on the head.")
    pod = environ.get("HEAD_POD_ID", "")
    if flag == "1" and not pod:
        raise ConfigError("HEAD_POD_ID is not set, and RAY_WORKER=1: export the head's pod id on every worker.")
    head = f"{pod}.runpod.internal" if pod else ""
    return Role(flag == "0", head, _nodes_of(environ), default_nodes=2)


def _ranked(rank: str, number: str, addresses: str) -> Callable[[Environ], Role]:
    """Return the reader of a convention that counts nodes from 0. The first of `addresses` is the head's."""

    def read(environ: Environ) -> Role:
        found = re.split(r"[\s,]+", environ.get(addresses, "").strip())
        is_head = _number(environ, rank) == 0
        if not (found[0] or is_head):
            raise ConfigError(f"{rank} is set and {addresses} is not: a worker needs the head's address.")
        return Role(is_head, found[0], _number(environ, number, default=len(found)))

    return read


def by_hand(environ: Environ) -> Role:
    """Return the role from RAY_HEAD_IP, RAY_HEAD_PORT (default: 10001) and EXPECTED_WORKERS."""
    head = environ.get("RAY_HEAD_IP", "")
    port = _number(environ, "RAY_HEAD_PORT", default=10001)
    return Role(is_own_address(head), head, _nodes_of(environ), port, default_nodes=2)


def _nodes_of(environ: Environ) -> int | None:
    return 1 + _number(environ, "EXPECTED_WORKERS") if environ.get("EXPECTED_WORKERS") else None


CONVENTIONS: dict[str, tuple[Sequence[str], Callable[[Environ], Role]]] = {
    # docs.skypilot.co/en/stable/running-jobs/environment-variables.html
    "SkyPilot": (["SKYPILOT_NODE_RANK"], _ranked("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS")),
    # dstack.ai/docs/reference/environment-variables
    "dstack": (["DSTACK_NODE_RANK"], _ranked("DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP")),
    # docs.runpod.io/instant-clusters/configuration
    "RunPod's Instant Clusters": (["PRIMARY_ADDR"], _ranked("NODE_RANK", "NUM_NODES", "PRIMARY_ADDR")),
    # OpenRLHF-M's guide to several pods; docs.runpod.io/pods/networking for the names
    "pods of RunPod's global network": (["RAY_WORKER", "HEAD_POD_ID", "EXPECTED_WORKERS"], _runpod),
    # verl's guide to two nodes
    "hosts by hand": (["RAY_HEAD_IP", "RAY_HEAD_PORT"], by_hand),
}
"""Name -> its variables, one of which must be set, and the function that reads the role from them."""


def find_role(environ: Environ) -> Role:
    """Return the role that the environment gives. Default: a head, with the config's number of nodes."""
    for variables, read in CONVENTIONS.values():
        if any(map(environ.get, variables)):
            return read(environ)
    return Role(is_head=True, head="")


def node_name(environ: Environ = os.environ) -> str:
    """Return this node's name: the pod's id if there is one, else the hostname without its domain."""
    return environ.get("RUNPOD_POD_ID") or socket.gethostname().partition(".")[0]


def interface_of(address: str) -> str | None:
    """Return the interface that has this address on this machine; None for loopback."""
    for name, found in psutil.net_if_addrs().items():
        if name != "lo" and address in (each.address for each in found):
            return str(name)
    return None


def _number(environ: Environ, name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text!r} must be a number.")
    return int(text)
