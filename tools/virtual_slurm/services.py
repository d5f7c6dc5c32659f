"""The daemons, in the order in which they need each other: munge, MariaDB, slurmdbd, slurmctld, slurmd."""

from __future__ import annotations

import subprocess

from tools.virtual_machines import machine
from tools.virtual_machines.errors import MachineError
from tools.virtual_machines.processes import wait_until

from .layout import CLUSTER_NAME, CONTROLLER, LOGIN, Layout
from .slurm_conf import DATABASE_PORT

_DEADLINE_S = 60.0


def start_munge(layout: Layout, name: str) -> None:
    # --force: after a node was killed its socket and lock file are still there.
    command = ["munged", "--force", "--num-threads=2"]
    command += [f"--key-file={layout.munge_key}", f"--socket={layout.munge_socket}"]
    command += [f"--{kind}-file={layout.local}/munged.{kind}" for kind in ("pid", "log", "seed")]
    machine.check(layout, name, command)


def begin_creating_database(layout: Layout) -> subprocess.Popen[str]:
    """Begin what is the slowest part of coming up: the rest is started meanwhile."""
    command = ["mariadb-install-db", "--no-defaults", "--user=root", "--skip-test-db"]
    with (layout.logs / "mariadb-install.log").open("w") as log:
        return machine.popen(
            layout,
            CONTROLLER,
            [*command, f"--datadir={layout.database}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def start_database(layout: Layout, creation: subprocess.Popen[str]) -> None:
    try:
        code = creation.wait(_DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise MachineError(f"mariadb-install-db took longer than {_DEADLINE_S:.0f} s") from error
    if code != 0:
        raise MachineError(f"mariadb-install-db ended with {code}")
    local = layout.local
    command = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={layout.database}"]
    command += [f"--socket={local}/mariadb.sock", "--bind-address=127.0.0.1", f"--port={DATABASE_PORT}"]
    command += [f"--pid-file={local}/mariadb.pid", f"--init-file={local}/init.sql"]
    command += [f"--log-error={layout.logs}/mariadb.log", "--innodb-buffer-pool-size=64M"]
    # The data live as long as the cluster: nothing is gained by waiting for the disk.
    command += ["--innodb-flush-log-at-trx-commit=0"]
    machine.check(layout, CONTROLLER, ["setsid", "--fork", *command])
    ping = ["mariadb-admin", "--no-defaults", f"--socket={local}/mariadb.sock", "ping"]
    _wait_for_success(layout, CONTROLLER, ping)


def start_accounting(layout: Layout) -> None:
    machine.check(layout, CONTROLLER, ["slurmdbd"])
    _wait_for_success(layout, CONTROLLER, ["sacctmgr", "-n", "show", "cluster"])
    machine.check(layout, CONTROLLER, ["sacctmgr", "-i", "add", "cluster", CLUSTER_NAME])


def start_slurmctld(layout: Layout) -> None:
    machine.check(layout, CONTROLLER, ["slurmctld"])


def start_slurmd(layout: Layout, name: str) -> None:
    machine.check(layout, name, ["slurmd"])


def node_states(layout: Layout) -> dict[str, str]:
    """Slurm's word for each node; empty while the controller does not answer."""
    done = machine.run(layout, LOGIN, ["sinfo", "-h", "-N", "-p", "workq", "-o", "%N %T"])
    return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}


def accounting_answers(layout: Layout) -> bool:
    return machine.run(layout, LOGIN, ["sacct", "-n", "-X"]).returncode == 0


def _wait_for_success(layout: Layout, name: str, argv: list[str]) -> None:
    last = ""

    def succeeds() -> bool:
        nonlocal last
        done = machine.run(layout, name, argv)
        last = done.stdout.strip()
        return done.returncode == 0

    try:
        wait_until(succeeds, _DEADLINE_S, " ".join(argv))
    except MachineError as error:
        raise MachineError(f"{error}: {last}") from error
