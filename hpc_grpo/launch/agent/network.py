"""Find this node's address on the network of the run, and free ports on it."""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpc_grpo.errors import LaunchError, NodesUnavailableError
from hpc_grpo.launch.agent.protocol import NodeSpec

LOOPBACK_IP = "127.0.0.2"
"""Ray replaces 127.0.0.1 by an address it finds by a probe of 8.8.8.8; the rest of 127/8 it leaves alone."""

_LOWEST_PORT = 10240
_HIGHEST_PORT = 65535


def _interfaces() -> dict[str, ipaddress.IPv4Interface]:
    """Return every interface with an IPv4 address; of several the first, and no alias such as eth0:1."""
    found: dict[str, ipaddress.IPv4Interface] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and ":" not in name:
                found.setdefault(name, ipaddress.IPv4Interface(f"{address.address}/{address.netmask or 32}"))
    return found


def network_of(interface: str) -> str | None:
    """Return the network that an interface is in, such as "10.253.0.0/16"; None without an IPv4 address."""
    found = _interfaces().get(interface)
    return None if found is None else str(found.network)


def choose_interface(named: str | None) -> tuple[str, str]:
    """Return (interface, address): the named one, the default route's or the only one. Raises NodesUnavailableError."""
    existing = {name: str(found.ip) for name, found in _interfaces().items() if name != "lo"}
    listed = ", ".join(f"{name} ({ip})" for name, ip in existing.items()) or "none"
    if named is not None:
        if named not in existing:
            raise NodesUnavailableError(
                f"launch.interface = {named}: {socket.gethostname()} has no such interface with an IPv4 address. "
                f"It has: {listed}."
            )
        return named, existing[named]
    routed = _default_route(Path("/proc/net/route").read_text())
    if routed in existing:
        return routed, existing[routed]
    if len(existing) == 1:
        return next(iter(existing.items()))
    raise NodesUnavailableError(
        f"{socket.gethostname()} has no default route; set launch.interface to one of: {listed}."
    )


def node_address(spec: NodeSpec) -> tuple[str, str]:
    """Return (interface, address) that Ray uses on this node. Raises NodesUnavailableError as `choose_interface`."""
    return ("lo", LOOPBACK_IP) if spec.loopback else choose_interface(spec.interface)


def _default_route(table: str) -> str:
    rows = [line.split() for line in table.splitlines()[1:]]
    defaults = [(int(row[6]), row[0]) for row in rows if row[1] == "00000000"]
    return min(defaults)[1] if defaults else ""


@dataclass(frozen=True)
class RayPorts:
    """Every port Ray listens on, on one node; workers use first_worker to last_worker."""

    gcs: int
    object_manager: int
    node_manager: int
    agent_http: int
    agent_grpc: int
    runtime_env: int
    dashboard: int
    first_worker: int
    last_worker: int


_NUM_FIXED_PORTS = 7


def choose_ports(tag: str, num_cpus: int, skip: int = 0, dashboard: int | None = None) -> RayPorts:
    """Return a free block of ports, outside the ephemeral range if there is one. Raises LaunchError if none is free.

    `dashboard` is the preferred port of Ray's dashboard; a retry does without. The attempt's tag says where the search
    starts, so two jobs on one node start apart. `skip` passes over free blocks, for a retry after losing a race.
    """
    preferred = dashboard if dashboard and not skip and _is_free(dashboard) else None
    stride = _NUM_FIXED_PORTS + 64 + 2 * num_cpus
    for base in block_starts(tag, stride, _ephemeral_ports()):
        if not all(_is_free(port) for port in range(base, base + stride)):
            continue
        if skip:
            skip -= 1
            continue
        gcs, objects, nodes, http, grpc, env, drawn = range(base, base + _NUM_FIXED_PORTS)
        first_worker, last_worker = base + _NUM_FIXED_PORTS, base + stride - 1
        return RayPorts(gcs, objects, nodes, http, grpc, env, preferred or drawn, first_worker, last_worker)
    raise LaunchError(f"No {stride} consecutive free ports from {_LOWEST_PORT} to {_HIGHEST_PORT}.")


def block_starts(tag: str, stride: int, ephemeral: range) -> Iterator[int]:
    """Yield the starts of blocks of `stride` ports: below the ephemeral ports, then above them, among them last.

    Any program's outgoing connection may take an ephemeral port, also after it was found free.
    """
    turn = int.from_bytes(hashlib.sha256(tag.encode()).digest()[:4], "big")
    below = range(_LOWEST_PORT, ephemeral.start)
    above = range(max(ephemeral.stop, _LOWEST_PORT), _HIGHEST_PORT + 1)
    among = range(max(ephemeral.start, _LOWEST_PORT), ephemeral.stop)
    for room in (below, above, among):
        starts = range(room.start, room.stop - stride + 1, stride)
        first = turn % max(1, len(starts))
        yield from starts[first:]
        yield from starts[:first]


def _ephemeral_ports() -> range:
    """Return the ports that the kernel gives to connections which ask for none."""
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return range(int(first), int(last) + 1)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As Ray's servers do; without it a port in TIME_WAIT from the last attempt counts as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
