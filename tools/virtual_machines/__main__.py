"""The command line: `python3 -m tools.virtual_machines --help`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from . import apptainer, containers, controller, host, lifecycle, machine, packages
from .bed_layout import KINDS, MAX_NODES, BedLayout, Shape
from .beds import Bed
from .errors import MachineError, exit_code_of

_USAGE = """\
    python3 -m tools.virtual_machines exec NAME -- bash     a shell on a machine; unplug, plug, kill, start NAME
    python3 -m tools.virtual_machines down                  leaves nothing"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="virtual_machines", description="Pods, hosts or VMs inside one machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="install sshd, nats-server, PostgreSQL, podman and Apptainer, starting nothing")

    up = commands.add_parser("up", help="bring machines up")
    defaults = Shape("pods", nodes=3)
    up.add_argument("kind", choices=KINDS)
    up.add_argument("--nodes", type=int, default=defaults.nodes, metavar="N")
    up.add_argument("--private-disks", action="store_true", help="STATE/storage is another folder on each machine")
    up.add_argument("--gpus-per-node", type=int, default=defaults.gpus_per_node, metavar="G", help="by nvidia-smi")

    commands.add_parser("down", help="take everything away")
    commands.add_parser("status", help="what is up; exit status 1 where nothing is")
    execute = commands.add_parser("exec", help="run a command on a machine")
    execute.add_argument("machine")
    execute.add_argument("argv", nargs="+", metavar="COMMAND")
    kill = commands.add_parser("kill", help="kill all that runs on a machine; its network stays")
    kill.add_argument("machine")
    kill.add_argument("--cut-network", action="store_true", help="unplug it first")
    for name, what in (("start", "bring a killed machine back"), ("unplug", "cut its network"), ("plug", "undo that")):
        commands.add_parser(name, help=what).add_argument("machine")
    service = commands.add_parser("service", help="of the VMs' controller")
    service.add_argument("service", choices=controller.SERVICES)
    service.add_argument("action", choices=("start", "stop", "freeze", "thaw", "wipe"))
    commands.add_parser("rootfs", help="make a root for `podman run --rootfs`").add_argument("folder", type=Path)
    return parser


def _up(layout: BedLayout, arguments: argparse.Namespace) -> None:
    if not 1 <= arguments.nodes <= MAX_NODES:
        raise MachineError(f"--nodes must be 1 to {MAX_NODES}, not {arguments.nodes}")
    start = time.monotonic()
    shape = Shape(arguments.kind, arguments.nodes, arguments.private_disks, arguments.gpus_per_node)
    bed = Bed.bring_up(layout, shape)
    print(f"up in {time.monotonic() - start:.1f} s\n{bed.status()}\n{_USAGE}")


def _run(arguments: argparse.Namespace) -> int:
    host.use_daemon_path(*packages.folders())
    layout = BedLayout.from_environment()
    match arguments.command:
        case "install":
            print(host.install(packages.PACKAGES, packages.COMMANDS, packages.folders))
            print(apptainer.install())
        case "up":
            _up(layout, arguments)
        case "down":
            print("down" if lifecycle.take_down(layout) else "nothing was up")
        case "rootfs":
            containers.write_rootfs(arguments.folder)
        case _:
            return _on_bed(Bed.attach(layout), arguments)
    return 0


def _on_bed(bed: Bed, arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "status":
            print(bed.status())
        case "exec":
            os.environ.update(bed.shape.environment(arguments.machine))
            os.environ["PATH"] = f"{bed.layout.programs}:{os.environ['PATH']}"
            return machine.run_in_foreground(bed.layout, arguments.machine, arguments.argv)
        case "kill":
            bed.kill(arguments.machine, cut_network=arguments.cut_network)
        case "service":
            getattr(controller, arguments.action)(bed.layout, arguments.service)
        case action:
            getattr(bed, action)(arguments.machine)
    return 0


def main() -> int:
    arguments = _parser().parse_args()
    return exit_code_of("virtual_machines", lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
