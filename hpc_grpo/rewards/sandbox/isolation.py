"""Find the isolation that this machine offers for a model's programs, and run a job in it.

`namespaces` (user namespaces, made by `enter`) and `bubblewrap` (the program bwrap, for sites that allow only that)
hide files, processes and network. `limits` hides nothing and only limits usage. It must be configured explicitly.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, Literal

from hpc_grpo.errors import ConfigError

STRONG = ("namespaces", "bubblewrap")
Choice = Literal["strong", "namespaces", "bubblewrap", "limits"]

_ENTER = Path(__file__).with_name("enter.py")
_INSIDE = Path(__file__).with_name("inside.py")
UNIT_TESTS = Path(__file__).with_name("unit_tests.py")
CELLS = Path(__file__).with_name("cells.py")
_PACKAGE = _INSIDE.parents[2]
_SYSTEM_PATHS = (
    *(f"{root}/{name}" for root in ("", "/usr") for name in ("bin", "sbin", "lib", "lib32", "lib64")),
    *("/usr/libexec", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/alternatives"),
)
_OF_PREFIX = ("bin", "lib", "lib32", "lib64", "include", "pyvenv.cfg")
"""Parts of a Python's prefix that the Python needs. The rest may be a project's files."""
_GRACE_S = 10.0
"""Time beyond the job's deadlines, to build and tear down the sandbox on a busy node."""

_MIB = 1 << 20
_OTHER_THREADS = 256
_SOCKET_SETTING, _SOCKET_BYTES = Path("/proc/sys/net/core/wmem_default"), 212_992
"""The file with a socket's buffer size, and Linux's default for a network namespace that hides the file."""


@dataclass(frozen=True)
class Limits:
    """Limits of one case, for all its processes together. `cpu_s` is per process.

    `memory_mib` also limits each process. `tmp_mib` also limits each file; isolation `limits` limits only each file.
    A case has `clock` times `cpu_s` seconds of wall time: a busy node gives a program part of a core, and a sleeping
    program must end too.
    """

    cpu_s: float = 2.0
    clock: float = 3.0
    memory_mib: int = 512
    processes: int = 32
    tmp_mib: int = 64
    output_kib: int = 256

    @property
    def wall_s(self) -> float:
        return self.clock * self.cpu_s


@dataclass(frozen=True)
class CaseResult:
    """How a case ended: `exit N`, `signal N`, or the limit that it exceeded (time, memory, processes, output)."""

    ended: str
    stdout: str = ""
    stderr: str = ""
    verdict: str = ""


class SandboxError(Exception):
    """The sandbox itself failed: no verdict on the program."""


def run_job(
    isolation: str,
    argv: list[str],
    files: dict[str, str],
    cases: list[str],
    limits: Limits,
    patience_s: float | None = None,
) -> list[CaseResult]:
    """Run `argv` once for each of `cases`, its stdin, in a new sandbox. Raises SandboxError if the sandbox fails.

    No case runs after one that does not end with `exit 0`. With `patience_s`, only a case that exceeds a limit after
    this many seconds is the last one. If a program kills the sandbox, the result of its case says so.
    """
    job: dict[str, Any] = {"id": "", "argv": argv, "files": files, "cases": cases, "patience_s": patience_s}
    job["limits"] = _for_kernel(isolation, limits)
    with _folder(isolation) as folder:
        try:
            done = subprocess.run(
                _command(isolation, limits),
                input=json.dumps(job).encode(),
                capture_output=True,
                **_surroundings(folder),
                timeout=limits.wall_s * max(1, len(cases)) + _GRACE_S,
            )
        except subprocess.TimeoutExpired:
            return [CaseResult("time")]
    if done.returncode == 0 and done.stdout:
        return [CaseResult(**result) for result in json.loads(done.stdout)["results"]]
    if done.returncode == 0 or done.returncode in (137, 256 - 9):
        return [CaseResult("the sandbox with it")]
    raise SandboxError(done.stderr.decode(errors="replace").strip()[-500:] or f"exit code {done.returncode}")


class SandboxedScorer:
    """Scores texts by functions that may run them as code: in one sandbox, which imports the functions once.

    A function is `module:name`. The sandbox calls it with the settings of a group, and gets a function from text to
    number. Each text is scored in its own fork, and cannot reach another text's score.

    Forks of the process that made it share the sandbox, one after the other. A killed fork leaves an unread answer, or
    an ended sandbox. The next fork skips that answer by its id, or starts another sandbox.
    """

    def __init__(self, isolation: str, limits: Limits) -> None:
        self._isolation, self._limits = isolation, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._exit = contextlib.ExitStack()  # the folder is removed with this object
        self._folder = self._exit.enter_context(_folder(isolation))

    def score(self, function: str, text: str, wall_s: float, **given: Any) -> float | None:
        """Return the score; None if the scoring of this text gave no number, exceeded a limit or died.

        Raises ConfigError if the function refuses its settings, SandboxError if the sandbox itself failed.
        """
        limits = {**_for_kernel(self._isolation, self._limits), "wall_s": wall_s}
        path = [*filter(None, sys.path), str(_PACKAGE.parent)]
        job: dict[str, Any] = {"id": secrets.token_hex(8), "scorer": function, "given": given, "path": path}
        job |= {"files": {}, "cases": [text], "limits": limits, "patience_s": None}
        answer = self._answer_to(job) or self._answer_to(job)  # a killed fork may have ended the sandbox
        if answer is None:
            self._errors.seek(0)
            raise SandboxError(self._errors.read().strip()[-500:] or "the sandbox has ended")
        result = CaseResult(**answer["results"][0])
        if result.ended == "refused":
            raise ConfigError(result.stderr)
        try:
            return float(result.verdict) if result.ended == "exit 0" else None
        except ValueError:  # a text that runs as code may write anything
            return None

    def _answer_to(self, job: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a job; None if the sandbox has ended."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the sandbox has ended, and will not answer
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        while line := process.stdout.readline():
            with contextlib.suppress(ValueError):  # the end of a line whose beginning a killed fork has read
                answer: dict[str, Any] = json.loads(line)
                if answer["id"] == job["id"]:
                    return answer
        self.close()
        return None

    def close(self) -> None:
        """End the sandbox, if there is one. A fork does not end its parent's sandbox, but only forgets it."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        # Not a pipe, which warnings would fill. Stays open as long as the process.
        self._errors = TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            _command(self._isolation, self._limits),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            **_surroundings(self._folder),
        )
        return self._process


@lru_cache
def find_isolation(wanted: str) -> str:
    """Return the isolation to use. Raises ConfigError if this machine does not offer the wanted isolation."""
    refuse_shown([Path.home(), Path.cwd()])
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
        f"or bubblewrap there, or set isolation: limits in rewards.N.args or environment.args, with which the model's "
        f"programs can read and write your files."
    )


def describe(isolation: str) -> str:
    """Describe in one line what a program can do in this isolation."""
    if isolation == "limits":
        return "NO isolation but limits of the kernel: programs can read and write your files"
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
        "socket_bytes": int(_SOCKET_SETTING.read_text()) if _SOCKET_SETTING.exists() else _SOCKET_BYTES,
        # Before Linux 5.14 the limit counts all the user's threads on the node, not only the namespace's.
        "kernel_processes": limits.processes + (0 if isolation in STRONG and version >= (5, 14) else _own_threads()),
    }


def _command(isolation: str, limits: Limits) -> list[str]:
    inside = [sys.executable, "-I", "-S", str(_INSIDE)]
    if isolation == "limits":
        return inside
    shown = shown_paths()
    if isolation == "bubblewrap":
        return _bubblewrap(shown, limits, inside)
    arguments = {"shown": shown, "tmp_bytes": limits.tmp_mib * _MIB, "argv": inside}
    return [sys.executable, "-I", "-S", str(_ENTER), json.dumps(arguments)]


def _folder(isolation: str) -> contextlib.AbstractContextManager[str]:
    """Return the start folder of a sandbox. With `limits` it is a new folder, because programs write into it."""
    if isolation == "limits":
        return TemporaryDirectory(prefix="hpc-grpo-code-")
    return contextlib.nullcontext("/")


def _surroundings(folder: str) -> dict[str, Any]:
    return {"cwd": folder, "env": {"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"}}


def _bubblewrap(shown: list[str], limits: Limits, inside: list[str]) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("there is no program bwrap")
    # The kernel does not limit root's processes.
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    words += [program, "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    if "--disable-userns" in subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout:
        words += ["--unshare-user", "--disable-userns"]  # since 0.8
    words += ["--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
    # See enter.py: _DEVICES. Also, no limit counts the contents of terminals.
    words += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", "/dev/null", "/dev/zero", "--tmpfs", "/dev/pts"]
    words += ["--size", str(limits.tmp_mib * _MIB), "--tmpfs", "/tmp"]
    read_only = ["/dev", "/dev/pts", "/"]
    for path in shown:
        if path.startswith("/tmp/") and (above := "/".join(path.split("/")[:3])) not in (*read_only, path):
            words += ["--tmpfs", above]
            read_only.append(above)
        if Path(path).is_symlink():
            words += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).exists():
            words += ["--ro-bind", path, path]
    words += [word for path in read_only for word in ("--remount-ro", path)]
    return [*words, "--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin:/bin", "--chdir", "/tmp", *inside]


def shown_paths() -> list[str]:
    """List the read-only paths of a program: the system's programs and libraries, this Python and this package."""
    executable = Path(sys.executable).resolve()
    prefixes = {Path(each) for each in (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)}
    own = {prefix / name for prefix in {*prefixes, executable.parent.parent} for name in _OF_PREFIX}
    paths = sorted({*map(Path, _SYSTEM_PATHS), *(path for path in own if path.exists()), _PACKAGE})
    return [str(path) for path in paths if not any(path.is_relative_to(other) for other in paths if other != path)]


def refuse_shown(private: Iterable[str | Path]) -> None:
    """Raise ConfigError if one of these paths is below a folder that sandboxed programs see."""
    for path in private:
        for shown in shown_paths():
            if Path(path).resolve().is_relative_to(Path(shown).resolve()):
                raise ConfigError(
                    f"Programs in the sandbox would see {path}: it lies below {shown}, which Python needs. Move {path} "
                    f"elsewhere, or use a Python environment in a folder of its own."
                )


def _own_threads() -> int:
    """Count this user's threads on the node, plus room for threads that start later."""
    count = 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and folder.stat().st_uid == os.getuid():
                count += folder.joinpath("task").stat().st_nlink - 2
    return count + _OTHER_THREADS
