"""The cables: a bridge in the hub's network, and one veth pair from it to each other machine."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from . import namespaces
from .errors import MachineError
from .layout import OUTSIDE_PREFIX, PREFIX_LENGTH, SUBNET_PREFIX, Layout, Machine


def _bridge_commands(machines: Sequence[Machine]) -> str:
    """For `ip -batch` in the hub's network."""
    # Machines have a default route, because libraries find "their" address by asking for the route to 8.8.8.8.
    # It leads here, where everything outside is answered "unreachable" at once.
    commands = "link set lo up\nroute add unreachable default\n" + _bridge("br0", SUBNET_PREFIX)
    return commands + (_bridge("outside", OUTSIDE_PREFIX) if any(machine.outside for machine in machines) else "")


def _bridge(name: str, prefix: str) -> str:
    return f"link add name {name} type bridge\naddr add {prefix}1/{PREFIX_LENGTH} dev {name}\nlink set {name} up\n"


def _port_name(machine_name: str) -> str:
    return f"to-{machine_name}"


def _cable_commands(machine: Machine, namespace: str) -> str:
    """For `ip -batch` in the hub's network."""
    port = _port_name(machine.name)
    commands = (
        f"link add name {port} type veth peer name {machine.interface} netns {namespace}\n"
        f"link set {port} master br0 up\n"
    )
    if machine.outside:
        uplink = f"up-{machine.name}"
        commands += f"link add name {uplink} type veth peer name eth0 netns {namespace}\n"
        # An isolated port reaches the bridge and no other isolated port.
        commands += f"link set {uplink} master outside up\nlink set {uplink} type bridge_slave isolated on\n"
    return commands


def _interface_commands(machine: Machine) -> str:
    """For `ip -batch` in the machine's own network."""
    commands = (
        "link set lo up\n"
        f"addr add {machine.address}/{PREFIX_LENGTH} dev {machine.interface}\n"
        f"link set {machine.interface} up\n"
    )
    if not machine.outside:
        return f"{commands}route add default via {SUBNET_PREFIX}1\n"
    return (
        f"{commands}addr add {machine.outside}/{PREFIX_LENGTH} dev eth0\n"
        f"link set eth0 up\nroute add default via {OUTSIDE_PREFIX}1\n"
    )


def _in_network(layout: Layout, name: str, argv: list[str], stdin: str = "") -> None:
    command = ["nsenter", f"--net={layout.network_namespace(name)}", *argv]
    done = subprocess.run(command, input=stdin, text=True, capture_output=True, timeout=60)
    if done.returncode != 0:
        raise MachineError(f"network of {name}: {done.stderr.strip() or done.returncode}")


def _ip(layout: Layout, name: str, commands: str) -> None:
    _in_network(layout, name, ["ip", "-batch", "-"], commands)


def build(layout: Layout, hub: str, machines: Sequence[Machine]) -> None:
    """Connect the machines. The bridge is in the network of `hub`, which need not be one of them."""
    for name in dict.fromkeys([hub, *(machine.name for machine in machines)]):
        layout.machine_dir(name).mkdir(parents=True, exist_ok=True)
        namespaces.create_network_namespace(layout.network_namespace(name))
    _ip(layout, hub, _bridge_commands(machines))
    # Without forwarding the kernel drops what it cannot route and says nothing.
    _in_network(layout, hub, ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
    for machine in machines:
        if machine.name != hub:
            _ip(layout, hub, _cable_commands(machine, str(layout.network_namespace(machine.name))))
            _ip(layout, machine.name, _interface_commands(machine))


def set_cable(layout: Layout, hub: str, name: str, plugged: bool) -> None:
    """Unplugged before it is killed, a machine falls silent as without power: no connection is closed."""
    _ip(layout, hub, f"link set {_port_name(name)} {'up' if plugged else 'down'}\n")
