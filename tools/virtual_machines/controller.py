"""Debian's nats-server and PostgreSQL on the controller, each to be stopped, frozen, and emptied."""

from __future__ import annotations

import secrets
import shutil
import signal
from pathlib import Path
from typing import Literal

from . import daemons, machine
from .bed_layout import CONTROLLER, BedLayout
from .errors import MachineError
from .layout import PREFIX_LENGTH, SUBNET_PREFIX
from .processes import wait_until

Service = Literal["nats", "postgres"]
SERVICES: tuple[Service, ...] = ("nats", "postgres")
NATS_URL = f"nats://{CONTROLLER}:4222"

_DEADLINE_S = 60.0
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_AS_POSTGRES = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")


def database_url(layout: BedLayout) -> str:
    """Return the URL of the empty database `fleet`, as any machine may use it."""
    return f"postgresql://fleet:{_password(layout).read_text()}@{CONTROLLER}:5432/fleet"


def start(layout: BedLayout, service: Service) -> None:
    """Start a service, and wait until it answers. The first start of PostgreSQL makes the database."""
    if service == "nats":
        command = ["nats-server", "-js", "-sd", str(_nats_store(layout)), "-a", "0.0.0.0", "-p", "4222"]
        daemons.start(layout, CONTROLLER, service, command, _ENVIRONMENT)
        wait_until(lambda: _answers(layout, 4222), _DEADLINE_S, "nats-server answers")
        return
    is_new = not _data(layout).exists()
    if is_new:
        _create_database(layout)
    # In a machine that was killed, the number in this file may be another process's by now.
    (_data(layout) / "postmaster.pid").unlink(missing_ok=True)
    settings = {"listen_addresses": "*", "unix_socket_directories": _folder(layout), "fsync": "off"}
    words = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
    daemons.start(
        layout,
        CONTROLLER,
        service,
        [*_AS_POSTGRES, str(_binary("postgres")), "-D", str(_data(layout)), *words],
        _ENVIRONMENT,
    )
    ready = [str(_binary("pg_isready")), "-q", "-h", CONTROLLER]
    wait_until(lambda: machine.run(layout, CONTROLLER, ready).returncode == 0, _DEADLINE_S, "PostgreSQL answers")
    if is_new:
        password = _password(layout).read_text()
        for statement in (f"CREATE ROLE fleet LOGIN PASSWORD '{password}'", "CREATE DATABASE fleet OWNER fleet"):
            psql = [*_AS_POSTGRES, str(_binary("psql")), "-h", str(_folder(layout)), "-d", "postgres", "-c", statement]
            machine.check(layout, CONTROLLER, psql)


def stop(layout: BedLayout, service: Service) -> None:
    """End a service; PostgreSQL drops its connections and writes its state."""
    daemons.stop(layout, CONTROLLER, service, signal.SIGINT if service == "postgres" else signal.SIGTERM)


def freeze(layout: BedLayout, service: Service) -> None:
    daemons.freeze(layout, CONTROLLER, service)


def thaw(layout: BedLayout, service: Service) -> None:
    daemons.thaw(layout, CONTROLLER, service)


def wipe(layout: BedLayout, service: Service) -> None:
    """Delete what a stopped service has stored."""
    if daemons.running(layout, CONTROLLER, service):
        raise MachineError(f"{service} runs: stop it first")
    shutil.rmtree(_nats_store(layout) if service == "nats" else _data(layout), ignore_errors=True)


def _create_database(layout: BedLayout) -> None:
    folder = _folder(layout)
    folder.mkdir(exist_ok=True)
    shutil.chown(folder, "postgres", "postgres")
    if not _password(layout).exists():
        _password(layout).touch(0o600)
        _password(layout).write_text(secrets.token_hex(16))
    command = [*_AS_POSTGRES, str(_binary("initdb")), "-D", str(_data(layout)), "--auth=peer", "--no-sync"]
    machine.check(layout, CONTROLLER, command, _DEADLINE_S)
    with (_data(layout) / "pg_hba.conf").open("a") as file:
        file.write(f"host fleet fleet {SUBNET_PREFIX}0/{PREFIX_LENGTH} scram-sha-256\n")


def _answers(layout: BedLayout, port: int) -> bool:
    probe = f"import socket; socket.create_connection(('{CONTROLLER}', {port}), 1).close()"
    return machine.run(layout, CONTROLLER, ["python3", "-c", probe]).returncode == 0


def _binary(name: str) -> Path:
    """Debian keeps PostgreSQL's programs by version, away from the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    if not found:
        raise MachineError(f"PostgreSQL's {name} not found: run `make machines-install`")
    return found[-1]


def _folder(layout: BedLayout) -> Path:
    return layout.machine_dir(CONTROLLER) / "postgres"


def _data(layout: BedLayout) -> Path:
    return _folder(layout) / "data"


def _password(layout: BedLayout) -> Path:
    return layout.machine_dir(CONTROLLER) / "database-password"


def _nats_store(layout: BedLayout) -> Path:
    return layout.machine_dir(CONTROLLER) / "nats"
