"""What must be installed, and whether this host can carry the cluster at all."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ClusterError, ClusterUnavailableError

PACKAGES = ("slurm-wlm", "slurmdbd", "mariadb-server", "munge", "iproute2")
_COMMANDS = (
    *(
        "slurmctld",
        "slurmd",
        "slurmdbd",
        "sbatch",
        "srun",
        "sacct",
        "sacctmgr",
        "sinfo",
        "scontrol",
        "munged",
    ),
    *("mariadbd", "mariadb-install-db", "mariadb-admin", "ip", "nsenter", "unshare", "setsid"),
)
_APT_DEADLINE_S = 1800

# Everything that `up` does to the host, tried where it leaves nothing behind.
_TRIAL = (
    "ip link add br0 type bridge && ip link add veth0 type veth peer name veth1"
    " && mount -t tmpfs tmpfs /dev/shm && mknod /dev/shm/gpu0 c 1 3"
)


def use_daemon_path() -> None:
    """The daemons live in the sbin folders, which an ordinary PATH lacks."""
    folders = os.environ.get("PATH", "/usr/bin:/bin").split(":")
    os.environ["PATH"] = ":".join(folders + [f for f in ("/usr/sbin", "/sbin") if f not in folders])


def _missing() -> list[str]:
    return [command for command in _COMMANDS if shutil.which(command) is None]


def require_root() -> None:
    if os.geteuid() != 0:
        raise ClusterUnavailableError("the virtual Slurm cluster needs root (namespaces, mounts): use sudo")


def require_usable_host() -> None:
    require_root()
    if missing := _missing():
        raise ClusterUnavailableError(f"{', '.join(missing)} not found: run `make slurm-install`")
    spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
    trial = subprocess.run(
        ["unshare", *spaces, "sh", "-c", _TRIAL],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if trial.returncode != 0:
        cause = " ".join(trial.stderr.split())
        raise ClusterUnavailableError(f"this host does not permit namespaces, bridges, mounts or mknod: {cause}")


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


def install() -> str:
    require_root()
    if not _missing():
        return "everything is installed"
    if shutil.which("apt-get") is None:
        raise ClusterUnavailableError(f"no apt-get here: install {', '.join(PACKAGES)} by hand")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=600"]
    with _services_held_back():
        for action in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
            done = subprocess.run([*apt, *action], env=environment, timeout=_APT_DEADLINE_S)
            if done.returncode != 0:
                raise ClusterError(f"apt-get {action[0]} ended with {done.returncode}")
    if missing := _missing():
        raise ClusterError(f"installed, but {', '.join(missing)} still not found")
    return f"installed {', '.join(PACKAGES)}"
