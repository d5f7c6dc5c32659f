"""Build a bed: its files, network and machines, and what a kind of machine runs for good."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from . import containers, controller, gpus, machine, namespaces, network, sshd
from .bed_layout import CONTROLLER, SWITCH, BedLayout, Shape
from .layout import Machine, Mounts, hosts_file, resolv_conf

REPOSITORY = Path(__file__).resolve().parents[2]
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def environment(layout: BedLayout, shape: Shape, name: str) -> dict[str, str]:
    """Return what a process on a machine starts with: nothing of this process's, but the home folder."""
    common = {"HOME": os.environ.get("HOME", "/root"), "LANG": "C.UTF-8", "PATH": f"{layout.programs}:{_PATH}"}
    return {**common, **shape.environment(name)}


def build(layout: BedLayout, shape: Shape) -> None:
    """Fill an empty state folder, and boot all machines."""
    machines = shape.machines
    for folder in (layout.local, layout.logs, layout.small_disk, layout.storage, layout.resolv_conf.parent):
        folder.mkdir(parents=True)
    namespaces.mount_tmpfs(layout.small_disk, shape.small_disk_mib, mode="1777")
    layout.resolv_conf.write_text(resolv_conf())
    layout.make_host_folders()
    for each in machines:
        for folder in (layout.machine_local(each.name), layout.machine_storage(each.name)):
            folder.mkdir(parents=True)
        layout.hosts(each.name).write_text(hosts_file(machines, each))
        containers.write_files(layout, each.name)
    gpus.write_program(layout)
    if shape.kind != "pods":
        sshd.write_files(layout, machines)
    network.build(layout, SWITCH, machines)
    for each in machines:
        boot(layout, shape, each)
    if shape.kind == "vms":
        controller.start(layout, "nats")
        controller.start(layout, "postgres")


def boot(layout: BedLayout, shape: Shape, each: Machine) -> None:
    """Boot one machine; with sshd, where its kind has it."""
    tmp = layout.machine_tmp(each.name)
    if shape.kind == "pods":  # a pod that is started again has a new container, and its volume
        shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(exist_ok=True)
    tmp.chmod(0o1777)
    binds = [*seen_below_tmp(tmp), (tmp, Path("/tmp")), *containers.binds(layout, each.name)]
    if shape.private_disks:
        binds.append((layout.machine_storage(each.name), layout.storage))
    if shape.kind != "pods":
        binds += sshd.binds(layout)
    if each.name != CONTROLLER:
        gpus.write_state(layout, each.name, shape.gpus_per_node)
    machine.boot(layout, each, Mounts(shape.shm_mib, tuple(binds)))
    if shape.kind != "pods":
        sshd.start(layout, each.name, environment(layout, shape, each.name))


def seen_below_tmp(tmp: Path) -> list[tuple[Path, Path]]:
    """Bind the checkout and its Python where they lie below the host's /tmp: a machine must find them there."""
    wanted = {REPOSITORY, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    inside = {path for path in wanted if path.is_relative_to("/tmp")}
    binds = []
    for path in (path for path in inside if inside.isdisjoint(path.parents)):
        target = tmp / path.relative_to("/tmp")
        target.mkdir(parents=True, exist_ok=True)
        binds.append((path, target))
    return binds
