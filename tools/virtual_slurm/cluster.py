"""Up, down, kill-node, start-node, plug, unplug, status."""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import asdict
from pathlib import Path

from tools.virtual_machines import containers, host, lifecycle, machine, namespaces, network
from tools.virtual_machines.errors import MachineError, UnavailableError
from tools.virtual_machines.layout import Machine, Mounts, hosts_file, resolv_conf
from tools.virtual_machines.processes import wait_until

from . import cgroups, packages, services, slurm_conf
from .layout import CONTROLLER, LOGIN, Layout, Shape

_IDLE_DEADLINE_S = 90.0
_USABLE_STATES = ("idle", "mixed", "allocated", "completing")


def read_shape(layout: Layout) -> Shape | None:
    """Return the shape of the cluster that is up, or None."""
    try:
        shape = Shape(**json.loads(layout.shape.read_text()))
    except FileNotFoundError:
        return None
    return shape if machine.running(layout, CONTROLLER) and machine.running(layout, LOGIN) else None


def require_up(layout: Layout) -> Shape:
    host.require_root()
    shape = read_shape(layout)
    if shape is None:
        raise MachineError("the virtual Slurm cluster is not up: run `make slurm-up`")
    return shape


def up(layout: Layout, shape: Shape) -> bool:
    """Bring the cluster up. False where it was up already."""
    host.require_usable(packages.COMMANDS, "make slurm-install")
    if shape.constrain_cores:
        cgroups.require(shape)
    with lifecycle.alone(layout):
        existing = read_shape(layout)
        if existing == shape:
            return False
        if existing is not None:
            raise MachineError(f"already up with {existing}, not {shape}: run `make slurm-down` first")

        def build() -> None:
            _write_files(layout, shape)
            network.build(layout, CONTROLLER, shape.machines)
            cgroups.make(layout, shape)
            _boot(layout, shape)
            wait_until(lambda: _ready(layout, shape), _IDLE_DEADLINE_S, "all nodes are idle and sacct answers")

        lifecycle.bring_up(layout, build, json.dumps(asdict(shape)), lambda: cgroups.remove(layout))
        return True


def _write_files(layout: Layout, shape: Shape) -> None:
    folders = [layout.etc_slurm, layout.local, layout.logs, layout.gpus, layout.small_disk]
    folders += [layout.controller_state, layout.spool, layout.database]
    folders += [layout.machine_local(m.name) for m in shape.machines]
    for folder in folders:
        folder.mkdir(parents=True)
    namespaces.mount_tmpfs(layout.small_disk, shape.small_disk_mib, mode="1777")
    for i in range(shape.gpus_per_node):
        try:
            os.mknod(layout.gpus / f"gpu{i}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError as error:
            raise UnavailableError(f"cannot make device files in {layout.gpus}: {error}") from error

    password = secrets.token_hex(16)
    _write_secret(layout.munge_key, secrets.token_bytes(128))
    _write_secret(layout.etc_slurm / "slurmdbd.conf", slurm_conf.slurmdbd_conf(layout, password).encode())
    init_sql = layout.machine_local(CONTROLLER) / "init.sql"
    _write_secret(init_sql, slurm_conf.database_init_sql(password).encode())
    conf = slurm_conf.slurm_conf(layout, shape, has_freezer=cgroups.has_freezer())
    (layout.etc_slurm / "slurm.conf").write_text(conf)
    (layout.etc_slurm / "cgroup.conf").write_text(slurm_conf.cgroup_conf())
    (layout.etc_slurm / "gres.conf").write_text(slurm_conf.gres_conf(layout, shape))
    layout.make_host_folders()
    for m in shape.machines:
        containers.write_files(layout, m.name)
        layout.hosts(m.name).write_text(hosts_file(shape.machines, m))
    layout.resolv_conf.write_text(resolv_conf())


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(0o600, exist_ok=False)
    path.write_bytes(content)


def _boot(layout: Layout, shape: Shape) -> None:
    controller, *others = shape.machines
    _boot_machine(layout, shape, controller)
    database = services.begin_creating_database(layout)
    for other in others:
        _boot_machine(layout, shape, other)
    for m in shape.machines:
        services.start_munge(layout, m.name)
    services.start_database(layout, database)
    services.start_accounting(layout)
    services.start_slurmctld(layout)
    for name in shape.node_names:
        services.start_slurmd(layout, name)


def _boot_machine(layout: Layout, shape: Shape, m: Machine) -> None:
    binds = ((layout.etc_slurm, Path("/etc/slurm")), *cgroups.binds(layout, m.name), *containers.binds(layout, m.name))
    machine.boot(layout, m, Mounts(shape.mem_per_node_mib, binds))


def _ready(layout: Layout, shape: Shape) -> bool:
    idle = services.node_states(layout) == dict.fromkeys(shape.node_names, "idle")
    return idle and services.accounting_answers(layout)


def down(layout: Layout) -> bool:
    """Take the cluster away. False where there was nothing."""
    return lifecycle.take_down(layout, lambda: cgroups.remove(layout))


def _require_node(layout: Layout, name: str) -> Shape:
    shape = require_up(layout)
    if name not in shape.node_names:
        raise MachineError(f"no node {name}; there are {', '.join(shape.node_names)}")
    return shape


def kill_node(layout: Layout, name: str, cut_network: bool = False) -> None:
    _require_node(layout, name)
    with lifecycle.alone(layout):
        if machine.running(layout, name) is None:
            raise MachineError(f"{name} is dead already")
        if cut_network:
            network.set_cable(layout, CONTROLLER, name, plugged=False)
        machine.kill(layout, name)


def set_cable(layout: Layout, name: str, plugged: bool) -> None:
    _require_node(layout, name)
    with lifecycle.alone(layout):
        network.set_cable(layout, CONTROLLER, name, plugged)


def start_node(layout: Layout, name: str) -> None:
    shape = _require_node(layout, name)
    with lifecycle.alone(layout):
        if machine.running(layout, name) is not None:
            raise MachineError(f"{name} is running already")
        network.set_cable(layout, CONTROLLER, name, plugged=True)
        _boot_machine(layout, shape, next(m for m in shape.machines if m.name == name))
        services.start_munge(layout, name)
        services.start_slurmd(layout, name)

        def usable() -> bool:
            return services.node_states(layout).get(name, "") in _USABLE_STATES

        wait_until(usable, _IDLE_DEADLINE_S, f"{name} is usable again")


def status(layout: Layout) -> str:
    shape = require_up(layout)
    states = services.node_states(layout)
    lines = [f"{shape}", f"logs in {layout.logs}, a small disk for full-disk tests at {layout.small_disk}"]
    for m in shape.machines:
        init = machine.running(layout, m.name)
        process = f"init pid {init.pid}" if init else "dead"
        lines.append(f"{m.name:10} {m.address:14} {process:16} {states.get(m.name, '')}".rstrip())
    return "\n".join(lines)
