"""Up, down, kill-node, start-node, plug, unplug, status."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import cgroups, machine, namespaces, network, packages, services, slurm_conf
from .errors import ClusterError, ClusterUnavailableError
from .layout import CONTROLLER, LOGIN, Layout, Shape
from .processes import wait_until

_IDLE_DEADLINE_S = 90.0
_LOG_TAIL_LINES = 8
_USABLE_STATES = ("idle", "mixed", "allocated", "completing")


@contextmanager
def _alone(layout: Layout) -> Iterator[None]:
    """One command at a time changes the cluster. The lock is the state folder, so it leaves no file."""
    while True:
        layout.state.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(layout.state, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Whoever held the lock may have been `down`, which deletes the folder.
            if layout.state.exists() and os.path.samestat(os.fstat(descriptor), layout.state.stat()):
                yield
                return
        finally:
            os.close(descriptor)


def read_shape(layout: Layout) -> Shape | None:
    """The shape of the cluster that is up, or None."""
    try:
        shape = Shape.from_json(layout.shape.read_text())
    except FileNotFoundError:
        return None
    return shape if machine.running(layout, CONTROLLER) and machine.running(layout, LOGIN) else None


def require_up(layout: Layout) -> Shape:
    packages.require_root()
    shape = read_shape(layout)
    if shape is None:
        raise ClusterError("the virtual Slurm cluster is not up: run `make slurm-up`")
    return shape


def up(layout: Layout, shape: Shape) -> bool:
    """Bring the cluster up. False where it was up already."""
    packages.require_usable_host()
    if shape.constrain_cores:
        cgroups.require(shape)
    with _alone(layout):
        existing = read_shape(layout)
        if existing == shape:
            return False
        if existing is not None:
            raise ClusterError(f"already up with {existing}, not {shape}: run `make slurm-down` first")
        _tear_down(layout)
        try:
            _write_files(layout, shape)
            network.build(layout, shape)
            cgroups.make(layout, shape)
            _boot(layout, shape)
            wait_until(lambda: _ready(layout, shape), _IDLE_DEADLINE_S, "all nodes are idle and sacct answers")
            layout.shape.write_text(shape.to_json())
        except BaseException as error:
            logs = _log_tails(layout) if isinstance(error, ClusterError) else ""
            _tear_down(layout)
            layout.state.rmdir()
            if isinstance(error, ClusterError):
                raise type(error)(f"{error}{logs}") from error
            raise
        return True


def _write_files(layout: Layout, shape: Shape) -> None:
    layout.marker.touch()
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
            raise ClusterUnavailableError(f"cannot make device files in {layout.gpus}: {error}") from error

    password = secrets.token_hex(16)
    _write_secret(layout.munge_key, secrets.token_bytes(128))
    _write_secret(layout.etc_slurm / "slurmdbd.conf", slurm_conf.slurmdbd_conf(layout, password).encode())
    init_sql = layout.machine_local(CONTROLLER) / "init.sql"
    _write_secret(init_sql, slurm_conf.database_init_sql(password).encode())
    conf = slurm_conf.slurm_conf(layout, shape, has_freezer=cgroups.has_freezer())
    (layout.etc_slurm / "slurm.conf").write_text(conf)
    (layout.etc_slurm / "cgroup.conf").write_text(slurm_conf.cgroup_conf())
    (layout.etc_slurm / "gres.conf").write_text(slurm_conf.gres_conf(layout, shape))
    layout.hosts.write_text(slurm_conf.hosts(shape))
    layout.resolv_conf.write_text(slurm_conf.resolv_conf())


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(0o600, exist_ok=False)
    path.write_bytes(content)


def _boot(layout: Layout, shape: Shape) -> None:
    controller, *others = shape.machines
    machine.boot(layout, shape, controller)
    database = services.begin_creating_database(layout)
    for other in others:
        machine.boot(layout, shape, other)
    for m in shape.machines:
        services.start_munge(layout, m.name)
    services.start_database(layout, database)
    services.start_accounting(layout)
    services.start_slurmctld(layout)
    for name in shape.node_names:
        services.start_slurmd(layout, name)


def _ready(layout: Layout, shape: Shape) -> bool:
    idle = services.node_states(layout) == dict.fromkeys(shape.node_names, "idle")
    return idle and services.accounting_answers(layout)


def _log_tails(layout: Layout) -> str:
    parts = []
    for path in sorted(layout.logs.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        parts.append("\n".join([f"\n--- {path.name}", *lines]))
    return "".join(parts)


def down(layout: Layout) -> bool:
    """Take the cluster away. False where there was nothing."""
    packages.require_root()
    if not layout.state.exists():
        return False
    with _alone(layout):
        was_there = layout.marker.exists()
        _tear_down(layout)
        layout.state.rmdir()
    return was_there


def _tear_down(layout: Layout) -> None:
    """Leave the state folder empty. Whatever an `up` that was cut short left, this takes away too."""
    if not layout.marker.exists():
        if any(layout.state.iterdir()):
            raise ClusterError(f"{layout.state} holds files of somebody else: choose another folder")
        return
    for folder in layout.machine_dir("").glob("*"):
        machine.kill(layout, folder.name)
    cgroups.remove(layout)
    for target in namespaces.mounts_below(layout.state):
        namespaces.unmount(target)
    for path in layout.state.iterdir():
        # The marker goes last, so that an interrupted `down` can be repeated.
        if path != layout.marker:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    layout.marker.unlink()


def _require_node(layout: Layout, name: str) -> Shape:
    shape = require_up(layout)
    if name not in shape.node_names:
        raise ClusterError(f"no node {name}; there are {', '.join(shape.node_names)}")
    return shape


def kill_node(layout: Layout, name: str, cut_network: bool = False) -> None:
    _require_node(layout, name)
    with _alone(layout):
        if machine.running(layout, name) is None:
            raise ClusterError(f"{name} is dead already")
        if cut_network:
            network.set_cable(layout, name, plugged=False)
        machine.kill(layout, name)


def set_cable(layout: Layout, name: str, plugged: bool) -> None:
    _require_node(layout, name)
    with _alone(layout):
        network.set_cable(layout, name, plugged)


def start_node(layout: Layout, name: str) -> None:
    shape = _require_node(layout, name)
    with _alone(layout):
        if machine.running(layout, name) is not None:
            raise ClusterError(f"{name} is running already")
        network.set_cable(layout, name, plugged=True)
        machine.boot(layout, shape, next(m for m in shape.machines if m.name == name))
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
