"""The command line: `python3 -m tools.virtual_slurm --help`."""

from __future__ import annotations

import argparse
import sys
import time

from tools.virtual_machines import host, machine
from tools.virtual_machines.errors import MachineError, exit_code_of

from . import cluster, packages
from .layout import LOGIN, MAX_NODES, Layout, Shape

_USAGE = """\
    python3 -m tools.virtual_slurm exec -- sbatch job.sh    on the login node, like srun, sacct, scontrol, ...
    python3 -m tools.virtual_slurm exec -- bash             a shell on the login node
    python3 -m tools.virtual_slurm kill-node nid002         and start-node, status
    python3 -m tools.virtual_slurm down                     leaves nothing"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="virtual_slurm",
        description="A real multi-node Slurm cluster inside one machine.",
        epilog="Mounts made on the host after `up` are not seen by the machines: mount first.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="install Slurm, munge and MariaDB, starting nothing")

    up = commands.add_parser("up", help="bring the cluster up")
    defaults = Shape(nodes=2)
    up.add_argument("--nodes", type=int, required=True, metavar="N")
    up.add_argument("--cpus-per-node", type=int, default=defaults.cpus_per_node, metavar="C")
    up.add_argument("--mem-per-node-mib", type=int, default=defaults.mem_per_node_mib, metavar="M")
    up.add_argument("--gpus-per-node", type=int, default=defaults.gpus_per_node, metavar="G", help="fake")
    up.add_argument(
        "--small-disk-mib",
        type=int,
        default=defaults.small_disk_mib,
        metavar="M",
        help="size of STATE/small-disk, shared by all machines, for tests of a full disk",
    )
    up.add_argument(
        "--constrain-cores",
        action="store_true",
        help="hold steps to the cores they asked for, with task/cgroup: no more CPUs a node than this machine has",
    )

    commands.add_parser("down", help="take everything away")
    commands.add_parser("status", help="what is up; exit status 1 where nothing is")

    execute = commands.add_parser("exec", help="run a command on the login node")
    execute.add_argument("--on", default=LOGIN, metavar="MACHINE", help="another machine, past Slurm")
    execute.add_argument("argv", nargs="+", metavar="COMMAND")

    kill = commands.add_parser("kill-node", help="kill all that runs on a node; its network stays")
    kill.add_argument("node")
    kill.add_argument(
        "--cut-network", action="store_true", help="unplug it first: peers see silence, no closed connection"
    )
    commands.add_parser("start-node", help="bring a killed node back").add_argument("node")
    commands.add_parser("unplug", help="cut a node's network; what runs on it runs on").add_argument("node")
    commands.add_parser("plug", help="give it its network back").add_argument("node")
    return parser


def _up(layout: Layout, arguments: argparse.Namespace) -> None:
    names = ("nodes", "cpus_per_node", "mem_per_node_mib", "gpus_per_node", "small_disk_mib", "constrain_cores")
    shape = Shape(**{name: getattr(arguments, name) for name in names})
    if not 1 <= shape.nodes <= MAX_NODES:
        raise MachineError(f"--nodes must be 1 to {MAX_NODES}, not {shape.nodes}")
    if shape.cpus_per_node < 1 or shape.mem_per_node_mib < shape.cpus_per_node or shape.gpus_per_node < 0:
        raise MachineError("--cpus-per-node must be 1 or more, --mem-per-node-mib 1 or more a CPU, GPUs 0 or more")
    start = time.monotonic()
    came_up = cluster.up(layout, shape)
    print(f"up in {time.monotonic() - start:.1f} s" if came_up else "already up")
    print(cluster.status(layout))
    print(_USAGE)


def _run(arguments: argparse.Namespace) -> int:
    host.use_daemon_path()
    layout = Layout.from_environment()
    match arguments.command:
        case "install":
            print(host.install(packages.PACKAGES, packages.COMMANDS))
        case "up":
            _up(layout, arguments)
        case "down":
            print("down" if cluster.down(layout) else "nothing was up")
        case "status":
            print(cluster.status(layout))
        case "exec":
            cluster.require_up(layout)
            return machine.run_in_foreground(layout, arguments.on, arguments.argv)
        case "kill-node":
            cluster.kill_node(layout, arguments.node, arguments.cut_network)
            print(f"{arguments.node} killed")
        case "start-node":
            cluster.start_node(layout, arguments.node)
            print(f"{arguments.node} is back")
        case "plug" | "unplug":
            cluster.set_cable(layout, arguments.node, plugged=arguments.command == "plug")
            print(f"{arguments.node} {arguments.command}ged")
    return 0


def main() -> int:
    arguments = _parser().parse_args()
    return exit_code_of("virtual_slurm", lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
