"""The command line, the environment, the address and the ports of Ray on one node.

Consumes a `NodeSpec`; produces argv and variables. Reads free shared memory, interfaces, ports, packages, variables.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions, requires
from itertools import islice
from pathlib import Path

import psutil

from hpc_grpo.config.resources import object_store_bytes
from hpc_grpo.errors import ConfigError, LaunchError, NodesUnavailableError
from hpc_grpo.launch.agent.folders import shm_dir_path
from hpc_grpo.launch.agent.protocol import NodeSpec
from hpc_grpo.launch.agent.stage import local_dir, staged, staged_environment
from hpc_grpo.launch.environment import RAY_SETTINGS, check_resolved, filtered
from hpc_grpo.launch.place.base import NodeResources
from hpc_grpo.run.contract import COPY_VARIABLES, PYTHON_VARIABLES, SHM_DIR_VARIABLE, TEMPLATE_MODULE
from hpc_grpo.run.source import PACKAGE, own_command

STARTED_LINE = "Ray runtime started."
"""`ray start` prints this once its processes answer."""

TEMP_DIR_NAME = "r"
"""Ray's temp-dir is inside our own folder, because Ray makes it writable for everybody."""

RAY_LOG_NAME = "ray_start.log"
"""The output of `ray start`, in the node's log folder."""

DASHBOARD_HOST = "127.0.0.1"
"""The dashboard asks for Ray's token but is not encrypted, so only ssh reaches it."""

LOOPBACK_IP = "127.0.0.2"
"""Ray replaces 127.0.0.1 by an address that it finds by a probe of 8.8.8.8. It keeps other addresses of 127/8."""

_MAX_SOCKET_PATH_BYTES = 107
_SESSION_PATH_BYTES = len("/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
_LOWEST_PORT = 10240
_HIGHEST_PORT = 65535
_NUM_FIXED_PORTS = 7


def ray_environment(environ: Mapping[str, str], spec: NodeSpec, ip: str, interface: str) -> dict[str, str]:
    """Return the variables of Ray, actors and (on the head) the driver. Raises ConfigError like `check_resolved`."""
    check_resolved(spec.env, environ)
    # For no_proxy: the other nodes' addresses are not known yet, so list their names and the network.
    nodes = [ip, (spec.head_address or "").partition(":")[0], network_of(interface), *spec.nodes]
    kept = filtered(environ, spec.pass_env, spec.env, filter(None, nodes))
    kept.setdefault("OMP_NUM_THREADS", "1")  # Ray copies it to actors; many processes share a node
    kept |= {name: value for name, (value, _reason) in RAY_SETTINGS.items()}
    kept |= {"RAY_AUTH_TOKEN_PATH": spec.token_path, "VLLM_HOST_IP": ip}
    kept[SHM_DIR_VARIABLE] = str(shm_dir_path(spec.tag))
    kept |= collective_interfaces(interface, kept)
    if environ.get("DEBUG_RAY") == "1":
        kept["RAY_DEBUG"] = "legacy"  # an actor's breakpoint waits for `ray debug` on loopback
    # vLLM leaves files in TMPDIR. This folder is removed with the attempt.
    kept["TMPDIR"] = str(temp_dir_path(spec, environ))
    kept |= spec.contract_env
    for name in COPY_VARIABLES:
        kept.pop(name, None)  # set by the job of another run, if that job started this one
    kept |= staged_environment(spec.stage, local_dir(spec, environ), kept)
    python = python_of(spec, environ)
    if python != sys.executable:
        kept |= dict.fromkeys(PYTHON_VARIABLES.values(), shlex.quote(python))
    kept |= {PYTHON_VARIABLES[kind]: command for kind, command in template_clients(spec, python).items()}
    return kept


def python_of(spec: NodeSpec, environ: Mapping[str, str]) -> str:
    """Return the Python of Ray and training on this node: this Python, or its copy (launch.stage.environment)."""
    copy = staged(spec.stage, local_dir(spec, environ)).get("environment")
    return str(copy / "bin" / "python") if copy else sys.executable


def collective_interfaces(interface: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return variables that keep collectives on `interface`. A user's setting for NCCL wins: it may name several."""
    only = f"={interface}"  # without "=", NCCL uses all interfaces with this prefix
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": given.get("NCCL_SOCKET_IFNAME", only)}


def start_command(spec: NodeSpec, ip: str, ports: RayPorts, temp_dir: Path, resources: NodeResources) -> list[str]:
    """Return the argv of `ray start` in the foreground, as head or joining `spec.head_address`."""
    python = python_of(spec, os.environ)
    command = [*own_command("-m", "hpc_grpo.launch.agent.ray_program", python=python), "start"]
    for kind in template_clients(spec, python):
        program = own_command("-m", TEMPLATE_MODULE, python=python)
        words = [_template_socket(spec, kind), kind, spec.templates_of]
        log = str(temp_dir.parent / f"{kind}_template.log")
        command.append(f"--template={json.dumps({'program': program, 'words': words, 'log': log})}")
    command += ["--block", "--disable-usage-stats"]
    if spec.head_address:
        command += [f"--address={spec.head_address}"]
    else:
        command += [
            "--head",
            f"--port={ports.gcs}",
            f"--include-dashboard={str(spec.dashboard_port is not None).lower()}",
            f"--dashboard-host={DASHBOARD_HOST}",
            f"--dashboard-port={ports.dashboard}",
            "--no-monitor",  # the autoscaler: there is nothing to scale, and it opens a metrics port on 0.0.0.0
        ]
    shm = os.statvfs("/dev/shm")
    return [
        *command,
        f"--node-ip-address={ip}",
        f"--object-manager-port={ports.object_manager}",
        f"--node-manager-port={ports.node_manager}",
        f"--dashboard-agent-listen-port={ports.agent_http}",
        f"--dashboard-agent-grpc-port={ports.agent_grpc}",
        f"--runtime-env-agent-port={ports.runtime_env}",
        f"--min-worker-port={ports.first_worker}",
        f"--max-worker-port={ports.last_worker}",
        f"--num-cpus={resources.num_cpus}",
        f"--num-gpus={resources.num_gpus}",
        f"--object-store-memory={object_store_bytes(spec.object_store_gib, shm.f_bavail * shm.f_frsize)}",
        f"--temp-dir={temp_dir}",
        "--include-log-monitor=false",  # logs are copied to the run directory, not streamed to the driver
        "--log-style=record",
        "--log-color=false",
    ]


def refuse_without_dashboard() -> None:
    """Raise ConfigError if packages that the installed Ray's dashboard needs are missing."""
    from packaging.requirements import Requirement  # comes with Ray, which the light installation lacks

    asked = [Requirement(text) for text in requires("ray") or ()]
    needed = [one.name for one in asked if one.marker and one.marker.evaluate({"extra": "default"})]
    if missing := [name for name in needed if not any(distributions(name=name))]:
        raise ConfigError(
            f"launch.ray_dashboard = true needs {', '.join(missing)}, which {sys.prefix} lacks: install ray[default] "
            f"there, or set launch.ray_dashboard=false."
        )


def template_clients(spec: NodeSpec, python: str) -> dict[str, str]:
    """Map each kind of actor with a template on this node to the command that starts its processes.

    Empty in a container, which has another Python. Leaves out a command if bash would change one of its words.
    """
    if spec.container or not spec.templates_of:
        return {}
    client = [python, "-I", "-S", str(PACKAGE / "template" / "client.py")]
    commands = {kind: [*client, _template_socket(spec, kind)] for kind in PYTHON_VARIABLES}
    return {kind: " ".join(words) for kind, words in commands.items() if shlex.join(words) == " ".join(words)}


def _template_socket(spec: NodeSpec, kind: str) -> str:
    return str(shm_dir_path(spec.tag) / f"{kind}.socket")


def temp_dir_path(spec: NodeSpec, environ: Mapping[str, str]) -> Path:
    """Return the folder around Ray's temp-dir. Raises LaunchError if the paths of Ray's sockets would be too long."""
    path = local_dir(spec, environ) / f"hg-{spec.tag}"
    if len(str(path).encode()) + _SESSION_PATH_BYTES > _MAX_SOCKET_PATH_BYTES:
        raise LaunchError(
            f"launch.local_dir = {spec.local_dir}: Ray's sockets below {path} would exceed the "
            f"{_MAX_SOCKET_PATH_BYTES} bytes a socket path may have. Choose a shorter folder, such as /tmp."
        )
    return path


def _interfaces() -> dict[str, ipaddress.IPv4Interface]:
    """Return every interface with an IPv4 address. Uses the first address, and no alias such as eth0:1."""
    found: dict[str, ipaddress.IPv4Interface] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and ":" not in name:
                found.setdefault(name, ipaddress.IPv4Interface(f"{address.address}/{address.netmask or 32}"))
    return found


def network_of(interface: str) -> str | None:
    """Return the network of an interface, such as "10.253.0.0/16"; None without an IPv4 address."""
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
    """Return (interface, address) that Ray uses on this node. Raises NodesUnavailableError like `choose_interface`."""
    return ("lo", LOOPBACK_IP) if spec.loopback else choose_interface(spec.interface)


def _default_route(table: str) -> str:
    rows = [line.split() for line in table.splitlines()[1:]]
    defaults = [(int(row[6]), row[0]) for row in rows if row[1] == "00000000"]
    return min(defaults)[1] if defaults else ""


@dataclass(frozen=True)
class RayPorts:
    """All ports of Ray on one node. Workers use first_worker to last_worker."""

    gcs: int
    object_manager: int
    node_manager: int
    agent_http: int
    agent_grpc: int
    runtime_env: int
    dashboard: int
    first_worker: int
    last_worker: int


def choose_ports(tag: str, num_cpus: int, skip: int = 0, dashboard: int | None = None) -> RayPorts:
    """Return a free block of ports, outside the ephemeral range if possible. Raises LaunchError if none is free.

    `dashboard` is the preferred port of Ray's dashboard. The attempt's tag decides where the search starts, so two jobs
    on one node use different blocks. A retry skips `skip` free blocks, and ignores `dashboard`.
    """
    preferred = dashboard if dashboard and not skip and _is_free(dashboard) else None
    stride = _NUM_FIXED_PORTS + 64 + 2 * num_cpus
    bases = block_starts(tag, stride, _ephemeral_ports())
    free = (base for base in bases if all(map(_is_free, range(base, base + stride))))
    if (base := next(islice(free, skip, None), None)) is None:
        raise LaunchError(f"No {stride} consecutive free ports from {_LOWEST_PORT} to {_HIGHEST_PORT}.")
    gcs, objects, nodes, http, grpc, env, drawn = range(base, base + _NUM_FIXED_PORTS)
    first_worker, last_worker = base + _NUM_FIXED_PORTS, base + stride - 1
    return RayPorts(gcs, objects, nodes, http, grpc, env, preferred or drawn, first_worker, last_worker)


def block_starts(tag: str, stride: int, ephemeral: range) -> Iterator[int]:
    """Yield the starts of blocks of `stride` ports: first below the ephemeral ports, then above, then among them.

    Any program's outgoing connection may take an ephemeral port, even one that was just free.
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
    """Return the ports that the kernel gives to outgoing connections."""
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return range(int(first), int(last) + 1)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Ray's servers set this too. Without it, a port in TIME_WAIT from the last attempt counts as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
