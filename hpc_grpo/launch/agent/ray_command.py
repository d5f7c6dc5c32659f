"""Build the command line and the environment of Ray on one node.

Consumes a `NodeSpec`, the node's address, ports and resources; produces argv and variables. Pure, but for
reading how much shared memory there is and which network an interface is in.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import distributions, requires
from pathlib import Path

from hpc_grpo.config.resources import object_store_bytes
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.agent.folders import shm_dir_path
from hpc_grpo.launch.agent.network import RayPorts, network_of
from hpc_grpo.launch.agent.protocol import NodeSpec
from hpc_grpo.launch.agent.stage import local_dir, staged, staged_environment
from hpc_grpo.launch.environment import RAY_SETTINGS, check_resolved, filtered
from hpc_grpo.launch.place.base import NodeResources
from hpc_grpo.run.contract import COPY_VARIABLES, PYTHON_VARIABLES, SHM_DIR_VARIABLE, TEMPLATE_MODULE
from hpc_grpo.run.source import PACKAGE, own_command

STARTED_LINE = "Ray runtime started."
"""`ray start` prints this once its processes answer."""

TEMP_DIR_NAME = "r"
"""Ray's temp-dir is a folder inside the one we own: Ray makes it writable for everybody."""

RAY_LOG_NAME = "ray_start.log"
"""In the log folder of the node: what `ray start` prints."""

DASHBOARD_HOST = "127.0.0.1"
"""Its page asks for Ray's token, but travels unencrypted, so it is reached through ssh alone."""

_MAX_SOCKET_PATH_BYTES = 107
_SESSION_PATH_BYTES = len("/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")


def ray_environment(
    environ: Mapping[str, str], spec: NodeSpec, ip: str, interface: str, shm_dir: str
) -> dict[str, str]:
    """Return the variables of Ray, the actors and (on the head) the driver. Raises ConfigError as `check_resolved`."""
    check_resolved(spec.env, environ)
    # The others' addresses are not known yet: their names, and for who calls them by address the network they are in.
    nodes = [ip, (spec.head_address or "").partition(":")[0], network_of(interface), *spec.nodes]
    kept = filtered(environ, spec.pass_env, spec.env, filter(None, nodes))
    kept.setdefault("OMP_NUM_THREADS", "1")  # Ray copies it to actors; many processes share a node
    kept |= {name: value for name, (value, _reason) in RAY_SETTINGS.items()}
    kept |= {"RAY_AUTH_TOKEN_PATH": spec.token_path, "VLLM_HOST_IP": ip, SHM_DIR_VARIABLE: shm_dir}
    kept |= collective_interfaces(interface, kept)
    if environ.get("DEBUG_RAY") == "1":
        kept["RAY_DEBUG"] = "legacy"  # breakpoints of actors wait on loopback for `ray debug`, on their own node
    kept["TMPDIR"] = str(temp_dir_path(spec, environ))  # vLLM leaves files in it; this one goes with the attempt
    kept |= spec.contract_env
    for name in COPY_VARIABLES:
        kept.pop(name, None)  # of another run, in whose job this one was started
    kept |= staged_environment(spec.stage, local_dir(spec, environ), kept)
    python = python_of(spec, environ)
    if python != sys.executable:
        kept |= dict.fromkeys(PYTHON_VARIABLES.values(), shlex.quote(python))
    kept |= {PYTHON_VARIABLES[kind]: command for kind, command in template_clients(spec, python).items()}
    return kept


def python_of(spec: NodeSpec, environ: Mapping[str, str]) -> str:
    """Return the Python that Ray and training run on this node: this one, or its copy (launch.stage.environment)."""
    return staged(spec.stage, local_dir(spec, environ)).python


def collective_interfaces(interface: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep collectives on `interface`; NCCL may use several, so there the user's wins."""
    only = f"={interface}"  # without "=" NCCL takes all whose names begin so
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
            "--no-monitor",  # the autoscaler: nothing to scale, and it opens a metrics port on 0.0.0.0
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
    """Raise ConfigError where packages that the installed Ray's dashboard needs are missing."""
    from packaging.requirements import Requirement  # comes with Ray, which the light installation is without

    asked = [Requirement(text) for text in requires("ray") or ()]
    needed = [one.name for one in asked if one.marker and one.marker.evaluate({"extra": "default"})]
    if missing := [name for name in needed if not any(distributions(name=name))]:
        raise ConfigError(
            f"launch.ray_dashboard = true needs {', '.join(missing)}, which {sys.prefix} lacks: install ray[default] "
            f"there, or set launch.ray_dashboard=false."
        )


def template_clients(spec: NodeSpec, python: str) -> dict[str, str]:
    """Map kinds of actors that have a template on this node to the command that starts their processes.

    None in a container, whose Python is another, and none where bash would change a word of the command.
    """
    if spec.container or not spec.templates_of:
        return {}
    client = [python, "-I", "-S", str(PACKAGE / "template" / "client.py")]
    commands = {kind: [*client, _template_socket(spec, kind)] for kind in PYTHON_VARIABLES}
    return {kind: " ".join(words) for kind, words in commands.items() if shlex.join(words) == " ".join(words)}


def _template_socket(spec: NodeSpec, kind: str) -> str:
    return str(shm_dir_path(spec.tag) / f"{kind}.socket")


def temp_dir_path(spec: NodeSpec, environ: Mapping[str, str]) -> Path:
    """Return the folder around Ray's temp-dir: node-local and short. Raises LaunchError when sockets would not fit."""
    path = local_dir(spec, environ) / f"hg-{spec.tag}"
    if len(str(path).encode()) + _SESSION_PATH_BYTES > _MAX_SOCKET_PATH_BYTES:
        raise LaunchError(
            f"launch.local_dir = {spec.local_dir}: Ray's sockets below {path} would exceed the "
            f"{_MAX_SOCKET_PATH_BYTES} bytes a socket path may have. Choose a shorter folder, such as /tmp."
        )
    return path
