"""This node's address on the network of the run, and free ports on it."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.errors import LaunchError, NodesUnavailableError
from hpc_grpo.launch.agent.protocol import NodeSpec

_SIOCGIFADDR = 0x8915
_SIOCGIFNETMASK = 0x891B
LOOPBACK_IP = "127.0.0.2"
"""Ray replaces 127.0.0.1 by an address it finds by a probe of 8.8.8.8; the rest of 127/8 it leaves alone."""

_LOWEST_PORT = 10240
_HIGHEST_PORT = 65535


def address_of(interface: str) -> str | None:
    """IPv4 address of an interface; None when it has none."""
    return _asked(interface, _SIOCGIFADDR)


def network_of(interface: str) -> str | None:
    """The network that an interface is in, such as "10.253.0.0/16"; None without an IPv4 address."""
    ip, mask = address_of(interface), _asked(interface, _SIOCGIFNETMASK)
    return str(ipaddress.ip_network(f"{ip}/{mask}", strict=False)) if ip and mask else None


def _asked(interface: str, request: int) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        named = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), request, named)[20:24])
        except OSError:
            return None


def choose_interface(named: str | None) -> tuple[str, str]:
    """(interface, address): the named one, else that of the default route, else the only one there is.

    Raises NodesUnavailableError with the interfaces that exist.
    """
    existing = {name: ip for _, name in socket.if_nameindex() if name != "lo" and (ip := address_of(name))}
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
    """(interface, address) that Ray uses on this node. Raises NodesUnavailableError as `choose_interface` does."""
    return ("lo", LOOPBACK_IP) if spec.loopback else choose_interface(spec.interface)


def _default_route(table: str) -> str:
    """Interface of the default route with the lowest metric, from /proc/net/route; "" without one."""
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


def choose_ports(tag: str, num_cpus: int, skip: int = 0) -> RayPorts:
    """A free block of ports, at a place that follows from the attempt's tag and outside the ephemeral range if it can.

    Two jobs on one node start looking at different places. `skip` passes over so many free blocks, for a
    retry after losing a race. Raises LaunchError when no block is free.
    """
    num_workers = 64 + 2 * num_cpus
    stride = _NUM_FIXED_PORTS + num_workers
    for base in block_starts(tag, stride, _ephemeral_ports()):
        if not all(_is_free(port) for port in range(base, base + stride)):
            continue
        if skip:
            skip -= 1
            continue
        gcs, objects, nodes, http, grpc, env, dashboard = range(base, base + _NUM_FIXED_PORTS)
        first_worker, last_worker = base + _NUM_FIXED_PORTS, base + stride - 1
        return RayPorts(gcs, objects, nodes, http, grpc, env, dashboard, first_worker, last_worker)
    raise LaunchError(f"No {stride} consecutive free ports from {_LOWEST_PORT} to {_HIGHEST_PORT}.")


def block_starts(tag: str, stride: int, ephemeral: range) -> Iterator[int]:
    """Where to look for a block of `stride` ports: below the ephemeral ports, then above them, among them last.

    Any program's outgoing connection may take one of those, also after it was found free.
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
    """The ports that the kernel gives to connections which ask for none."""
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
