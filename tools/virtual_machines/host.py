"""What the host must have: root, namespaces, Debian's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import MachineError, UnavailableError

_COMMANDS = ("ip", "nsenter", "unshare", "setsid")
_APT_DEADLINE_S = 1800

# Everything that machines do to the host, tried where it leaves nothing behind.
_TRIAL = (
    "ip link add br0 type bridge && ip link add veth0 type veth peer name veth1"
    " && mount -t tmpfs tmpfs /dev/shm && mknod /dev/shm/gpu0 c 1 3"
)


def use_daemon_path(*folders: str) -> None:
    """Add the folders of daemons, which an ordinary PATH lacks."""
    known = os.environ.get("PATH", "/usr/bin:/bin").split(":")
    os.environ["PATH"] = ":".join(known + [f for f in ("/usr/sbin", "/sbin", *folders) if f not in known])


def missing(commands: Sequence[str]) -> list[str]:
    """Return those of the commands, and of those that any machine needs, that are not to be found."""
    return [command for command in (*_COMMANDS, *commands) if shutil.which(command) is None]


def require_root() -> None:
    if os.geteuid() != 0:
        raise UnavailableError("virtual machines need root (namespaces, mounts): use sudo")


def require_usable(commands: Sequence[str], install_with: str) -> None:
    """Raise where this host cannot carry machines that run `commands`."""
    require_root()
    if lacking := missing(commands):
        raise UnavailableError(f"{', '.join(lacking)} not found: run `{install_with}`")
    spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
    trial = subprocess.run(["unshare", *spaces, "sh", "-c", _TRIAL], capture_output=True, text=True, timeout=60)
    if trial.returncode != 0:
        cause = " ".join(trial.stderr.split())
        raise UnavailableError(f"this host does not permit namespaces, bridges, mounts or mknod: {cause}")


@contextmanager
def _services_held_back() -> Iterator[None]:
    """Debian's hook against starting services on installation. Left alone where the host has one already."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink(missing_ok=True)


def install(packages: Sequence[str], commands: Sequence[str], folders: Callable[[], Sequence[str]] = tuple) -> str:
    """Install Debian packages where one of `commands` is missing; start nothing of them.

    `folders` finds those that packages keep away from the PATH: before the installation there are none.
    """
    require_root()
    if not missing(commands):
        return "everything is installed"
    if shutil.which("apt-get") is None:
        raise UnavailableError(f"no apt-get here: install {', '.join(packages)} by hand")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=600"]
    with _services_held_back():
        for action in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            done = subprocess.run([*apt, *action], env=environment, timeout=_APT_DEADLINE_S)
            if done.returncode != 0:
                raise MachineError(f"apt-get {action[0]} ended with {done.returncode}")
    use_daemon_path(*folders())
    if lacking := missing(commands):
        raise MachineError(f"installed, but {', '.join(lacking)} still not found")
    return f"installed {', '.join(packages)}"
