"""Find the isolation that this machine gives to programs of a model's, and run a job in it.

`namespaces` (user namespaces, made by `enter`) and `bubblewrap` (the program bwrap, where a site allows only that one)
hide files, processes and network. `limits` hides nothing: it bounds what a program takes, and nobody gets it unasked.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from hpc_grpo.errors import ConfigError

STRONG = ("namespaces", "bubblewrap")
CHOICES = ("strong", *STRONG, "limits")

_ENTER = Path(__file__).with_name("enter.py")
_INSIDE = Path(__file__).with_name("inside.py")
_SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_GRACE_S = 10.0
"""Beyond the job's own deadlines: to build the sandbox and to tear it down, on a busy node."""

_MIB = 1 << 20
_OTHER_THREADS = 256


@dataclass(frozen=True)
class Limits:
    """Bounds what one case may take. `cpu_s` holds for each process, the rest for all of a case together."""

    cpu_s: float = 2.0
    memory_mib: int = 512
    processes: int = 32
    tmp_mib: int = 64
    output_kib: int = 256

    @property
    def wall_s(self) -> float:
        """A busy node gives a program a part of a core; sleeping is no way around the limit."""
        return 3.0 * self.cpu_s


@dataclass(frozen=True)
class CaseResult:
    """How a case ended: `exit N`, `signal N`, or the limit it passed (time, memory, processes, output)."""

    ended: str
    stdout: str = ""
    stderr: str = ""
    verdict: str = ""


class SandboxError(Exception):
    """The sandbox itself failed: no verdict on the program."""


def run_job(
    isolation: str, argv: list[str], files: dict[str, str], cases: list[str], limits: Limits, stop_early: bool = True
) -> list[CaseResult]:
    """Run `argv` once for each text on stdin, in a sandbox of its own. Raises SandboxError where it was not run.

    Cases behind the first that did not end with `exit 0` are not run with `stop_early`; a sandbox that dies of its
    programs is a result of the case it was in.
    """
    job = {
        "argv": argv,
        "files": files,
        "cases": cases,
        "limits": _for_kernel(isolation, limits),
        "stop_early": stop_early,
    }
    with TemporaryDirectory(prefix="hpc-grpo-code-") as folder:
        try:
            done = subprocess.run(
                _command(isolation, limits),
                input=json.dumps(job).encode(),
                capture_output=True,
                cwd=folder if isolation == "limits" else "/",
                env={"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"},
                timeout=limits.wall_s * max(1, len(cases)) + _GRACE_S,
            )
        except subprocess.TimeoutExpired:
            return [CaseResult("time")]
    if done.returncode == 0 and done.stdout:
        return [CaseResult(**result) for result in json.loads(done.stdout)]
    if done.returncode == 0 or done.returncode in (137, 256 - 9):
        return [CaseResult("the sandbox with it")]
    raise SandboxError(done.stderr.decode(errors="replace").strip()[-500:] or f"exit code {done.returncode}")


@lru_cache
def find_isolation(wanted: str) -> str:
    """Return the isolation to use. Raises ConfigError where this machine does not give what is wanted."""
    if wanted not in CHOICES:
        raise ConfigError(f"isolation is {wanted!r}; set rewards.N.args.isolation to one of {', '.join(CHOICES)}.")
    if wanted == "limits":
        if os.geteuid() == 0:
            raise ConfigError("isolation: limits is refused for root, whose processes the kernel does not limit.")
        return wanted
    reasons = []
    for name in STRONG if wanted == "strong" else (wanted,):
        try:
            [result] = run_job(name, [sys.executable, "-I", "-c", "print(6 * 7)"], {}, [""], Limits(cpu_s=10.0))
        except (SandboxError, OSError) as error:
            reasons.append(f"{name}: {error}")
            continue
        if result.stdout == "42\n":
            return name
        reasons.append(f"{name}: {result.ended}: {result.stderr.strip()[-300:]}")
    raise ConfigError(
        f"{platform.node()} cannot isolate programs as {wanted!r} asks ({'; '.join(reasons)}). Ask for user namespaces "
        f"or bubblewrap there, or set rewards.N.args.isolation: limits, with which the model's programs can read and "
        f"write your files and use the network."
    )


def describe(isolation: str) -> str:
    """Say in one line what a program can do in it."""
    if isolation == "limits":
        return "NO isolation but limits of the kernel: programs can read and write your files and use the network"
    return f"isolated by {isolation}: no network, no files but the system's, no other processes"


def _for_kernel(isolation: str, limits: Limits) -> dict[str, float]:
    version = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    return {
        "cpu_s": max(1, round(limits.cpu_s)),
        "wall_s": limits.wall_s,
        "memory_bytes": limits.memory_mib * _MIB,
        "processes": limits.processes,
        "file_bytes": limits.tmp_mib * _MIB,
        "output_bytes": limits.output_kib << 10,
        # Before 5.14 the kernel counts all threads of the user's on the node, and not those of a namespace.
        "kernel_processes": limits.processes + (0 if isolation in STRONG and version >= (5, 14) else _own_threads()),
    }


def _command(isolation: str, limits: Limits) -> list[str]:
    inside = [sys.executable, "-I", "-S", "-c", _INSIDE.read_text()]
    if isolation == "limits":
        return inside
    shown = _shown_paths()
    if isolation == "bubblewrap":
        return _bubblewrap(shown, limits, inside)
    arguments = {"shown": shown, "tmp_bytes": limits.tmp_mib * _MIB, "argv": inside}
    return [sys.executable, "-I", "-S", str(_ENTER), json.dumps(arguments)]


def _bubblewrap(shown: list[str], limits: Limits, inside: list[str]) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("there is no program bwrap")
    # Root's processes the kernel does not limit.
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    words += [program, "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    if "--disable-userns" in subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout:
        words += ["--unshare-user", "--disable-userns"]  # since 0.8
    words += ["--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
    for path in shown:
        if Path(path).is_symlink():
            words += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).exists():
            words += ["--ro-bind", path, path]
    words += ["--proc", "/proc", "--dev", "/dev", "--size", str(limits.tmp_mib * _MIB), "--tmpfs", "/tmp"]
    return [*words, "--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin:/bin", "--chdir", "/tmp", *inside]


def _shown_paths() -> list[str]:
    """List what a program sees read-only: the system's programs and libraries, and this Python with its packages."""
    prefixes = {str(Path(prefix)) for prefix in (sys.prefix, sys.base_prefix)}
    prefixes |= {str(Path(sys.executable).resolve().parent.parent)}
    own = [prefix for prefix in sorted(prefixes) if prefix != "/" and not prefix.startswith("/usr/")]
    return [*_SYSTEM_PATHS, *(prefix for prefix in own if prefix != "/usr")]


def _own_threads() -> int:
    """Count the threads of this user's on the node, with room for those that start meanwhile."""
    count = 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and folder.stat().st_uid == os.getuid():
                count += folder.joinpath("task").stat().st_nlink - 2
    return count + _OTHER_THREADS
