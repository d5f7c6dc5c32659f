"""The cables: a bridge in the controller's network, and one veth pair from it to each other machine."""

from __future__ import annotations

import subprocess

from . import namespaces
from .errors import ClusterError
from .layout import CONTROLLER, PREFIX_LENGTH, SUBNET_PREFIX, Layout, Shape


def _bridge_commands() -> str:
    """For `ip -batch` in the controller's network."""
    address = f"{SUBNET_PREFIX}1/{PREFIX_LENGTH}"
    # Nodes have a default route, because libraries find "their" address by asking for the route to 8.8.8.8.
    # It leads here, where everything outside is answered "unreachable" at once.
    return (
        "link set lo up\n"
        "link add name br0 type bridge\n"
        f"addr add {address} dev br0\n"
        "link set br0 up\n"
        "route add unreachable default\n"
    )


def _port_name(machine_name: str) -> str:
    return f"to-{machine_name}"


def _cable_commands(machine_name: str, namespace: str) -> str:
    """For `ip -batch` in the controller's network."""
    port = _port_name(machine_name)
    return f"link add name {port} type veth peer name eth0 netns {namespace}\nlink set {port} master br0 up\n"


def _interface_commands(address: str) -> str:
    """For `ip -batch` in the machine's own network."""
    return (
        "link set lo up\n"
        f"addr add {address}/{PREFIX_LENGTH} dev eth0\n"
        "link set eth0 up\n"
        f"route add default via {SUBNET_PREFIX}1\n"
    )


def _in_network(layout: Layout, name: str, argv: list[str], stdin: str = "") -> None:
    command = ["nsenter", f"--net={layout.network_namespace(name)}", *argv]
    done = subprocess.run(command, input=stdin, text=True, capture_output=True, timeout=60)
    if done.returncode != 0:
        raise ClusterError(f"network of {name}: {done.stderr.strip() or done.returncode}")


def _ip(layout: Layout, name: str, commands: str) -> None:
    _in_network(layout, name, ["ip", "-batch", "-"], commands)


def build(layout: Layout, shape: Shape) -> None:
    for machine in shape.machines:
        namespaces.create_network_namespace(layout.network_namespace(machine.name))
    _ip(layout, CONTROLLER, _bridge_commands())
    # Without forwarding the kernel drops what it cannot route and says nothing.
    _in_network(layout, CONTROLLER, ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
    for machine in shape.machines:
        if machine.name == CONTROLLER:
            continue
        path = str(layout.network_namespace(machine.name))
        _ip(layout, CONTROLLER, _cable_commands(machine.name, path))
        _ip(layout, machine.name, _interface_commands(machine.address))


def set_cable(layout: Layout, name: str, plugged: bool) -> None:
    """Unplugged before it is killed, a node falls silent as without power: no connection is closed."""
    _ip(layout, CONTROLLER, f"link set {_port_name(name)} {'up' if plugged else 'down'}\n")
