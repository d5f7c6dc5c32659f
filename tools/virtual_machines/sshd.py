"""Debian's sshd on every machine: own host keys, login by one key, known to all from the beginning."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import daemons, machine
from .bed_layout import BedLayout
from .layout import Machine
from .processes import wait_until

_DEADLINE_S = 30.0


def write_files(layout: BedLayout, machines: Sequence[Machine]) -> None:
    """Make the keys, and what `ssh NAME` needs on any machine."""
    layout.ssh.mkdir(mode=0o700)
    _make_key(layout.ssh_key, "user")
    known = []
    for each in machines:
        path = _host_key(layout, each.name)
        _make_key(path, each.name)
        kind, key, _ = path.with_suffix(".pub").read_text().split()
        known.append(f"{each.name},{each.address} {kind} {key}\n")
    layout.known_hosts.write_text("".join(known))
    (layout.ssh / "ssh_config").write_text(
        f"Host *\n  IdentityFile {layout.ssh_key}\n  GlobalKnownHostsFile {layout.known_hosts}\n"
        "  StrictHostKeyChecking yes\n"
    )


def _make_key(path: Path, comment: str) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=60)


def _host_key(layout: BedLayout, name: str) -> Path:
    return layout.machine_dir(name) / "ssh_host_ed25519_key"


def binds(layout: BedLayout) -> list[tuple[Path, Path]]:
    return [(layout.ssh / "ssh_config", Path("/etc/ssh/ssh_config"))]


def start(layout: BedLayout, name: str, environment: Mapping[str, str]) -> None:
    """Start sshd. Its sessions get `environment` and nothing of what started it."""
    config = layout.machine_dir(name) / "sshd_config"
    variables = " ".join(f'"{key}={value}"' for key, value in environment.items())
    config.write_text(
        f"HostKey {_host_key(layout, name)}\nAuthorizedKeysFile {layout.ssh_key.with_suffix('.pub')}\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        f"PermitRootLogin prohibit-password\nPidFile none\nMaxStartups 100\nMaxSessions 100\n"
        f"Subsystem sftp internal-sftp\nSetEnv {variables}\n"
    )
    daemons.start(layout, name, "sshd", ["/usr/sbin/sshd", "-D", "-e", "-f", str(config)], environment)

    def listens() -> bool:
        probe = "import socket; socket.create_connection(('127.0.0.1', 22), 1).close()"
        return machine.run(layout, name, ["python3", "-c", probe]).returncode == 0

    wait_until(listens, _DEADLINE_S, f"sshd on {name} answers")
