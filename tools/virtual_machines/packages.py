"""Debian's packages of a bed, and the commands by which one sees that they are installed."""

from pathlib import Path

PACKAGES = ("iproute2", "openssh-server", "nats-server", "postgresql", "podman", "crun", "patchelf")
COMMANDS = ("sshd", "ssh", "ssh-keygen", "nats-server", "postgres", "initdb", "podman", "crun", "setpriv", "patchelf")


def folders() -> list[str]:
    """Return where Debian keeps PostgreSQL's programs, by version and away from the PATH."""
    return sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")))
