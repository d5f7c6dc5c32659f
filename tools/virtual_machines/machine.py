"""Boot a machine, run something in it, kill it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import namespaces
from .errors import CommandNotFoundError, MachineError
from .layout import Layout, Machine, Mounts
from .processes import ProcessRecord, leave, watch

_COMMAND_DEADLINE_S = 60.0
_FORWARDED = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def _explained(step: Callable[[], None]) -> Callable[[], None]:
    """Write the cause to the child's stderr: subprocess says only that there was an exception."""

    def run() -> None:
        try:
            step()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            raise

    return run


def boot(layout: Layout, machine: Machine, mounts: Mounts) -> None:
    """Start the machine's init, the first process of its PID space: with it die all the others."""
    network = os.open(layout.network_namespace(machine.name), os.O_RDONLY)

    def become_machine() -> None:
        # It records itself before it is anything that `down` could miss. /proc is still the host's: in its
        # own PID space the pid would read 1.
        ProcessRecord.of(int(os.readlink("/proc/self"))).write(layout.init_record(machine.name))  # noqa: PTH115
        namespaces.setns(network)
        namespaces.unshare(namespaces.CLONE_NEWUTS | namespaces.CLONE_NEWIPC | namespaces.CLONE_NEWNS)
        namespaces.make_mounts_private()
        namespaces.mount_proc()
        namespaces.mount_tmpfs(Path("/dev/shm"), mounts.shm_mib, mode="1777")
        namespaces.bind(layout.machine_local(machine.name), layout.local)
        for source, target in mounts.binds:
            namespaces.bind(source, target)
        namespaces.bind(layout.hosts(machine.name), Path("/etc/hosts"))
        if Path("/etc/resolv.conf").exists():
            namespaces.bind(layout.resolv_conf, Path("/etc/resolv.conf"))
        socket.sethostname(machine.own_name)
        # Orphans become children of init. Ignoring SIGCHLD, which survives exec, has the kernel reap them.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    log = layout.logs / f"boot-{machine.name}.log"
    try:
        with log.open("ab") as output, namespaces.pid_namespace_for_children(None):
            init = subprocess.Popen(
                ["sleep", "infinity"],
                preexec_fn=_explained(become_machine),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except subprocess.SubprocessError as error:
        raise MachineError(f"{machine.name} did not boot:\n{log.read_text()}") from error
    finally:
        os.close(network)
    leave(init)


def running(layout: Layout, name: str) -> ProcessRecord | None:
    record = ProcessRecord.read(layout.init_record(name))
    return record if record is not None and record.alive() else None


def kill(layout: Layout, name: str) -> None:
    """End the machine and with it every process that runs in it. Its network stays."""
    path = layout.init_record(name)
    record = ProcessRecord.read(path)
    if record is not None:
        record.kill()
        path.unlink()


def popen(
    layout: Layout, name: str, argv: Sequence[str], cwd: Path = Path("/"), *, outlives: bool = False, **options: Any
) -> subprocess.Popen[str]:
    """subprocess.Popen inside a machine. The child gets SIGTERM when this process dies, unless it `outlives` it."""
    init = running(layout, name)
    if init is None:
        raise MachineError(f"{name} is not running")
    opened: list[int] = []
    try:
        for kind in ("net", "uts", "ipc", "mnt"):
            opened.append(os.open(f"/proc/{init.pid}/ns/{kind}", os.O_RDONLY))
        pid_space = os.open(f"/proc/{init.pid}/ns/pid", os.O_RDONLY)
        opened.append(pid_space)

        def enter() -> None:
            for descriptor in opened[:-1]:
                namespaces.setns(descriptor)
            os.chdir(cwd)
            if not outlives:
                namespaces.signal_on_parent_death(signal.SIGTERM)

        with namespaces.pid_namespace_for_children(pid_space):
            process = subprocess.Popen(list(argv), preexec_fn=_explained(enter), text=True, **options)
        leave(process) if outlives else watch(process)
        return process
    except FileNotFoundError as error:
        raise CommandNotFoundError(f"{name}: {error}") from error
    except subprocess.SubprocessError as error:
        raise MachineError(f"cannot enter {name} (folder {cwd})") from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def run(
    layout: Layout, name: str, argv: Sequence[str], deadline_s: float = _COMMAND_DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Its output goes to a file: a daemon it leaves would keep a pipe open."""
    path = layout.logs / f"run-{name}-{os.getpid()}.log"
    try:
        with path.open("w") as output:
            process = popen(layout, name, argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            try:
                code = process.wait(deadline_s)
            except subprocess.TimeoutExpired as error:
                process.kill()
                process.wait()
                raise MachineError(f"{name}: {argv[0]} took longer than {deadline_s:.0f} s") from error
        return subprocess.CompletedProcess(list(argv), code, path.read_text(), "")
    finally:
        path.unlink(missing_ok=True)


def check(layout: Layout, name: str, argv: Sequence[str], deadline_s: float = _COMMAND_DEADLINE_S) -> str:
    done = run(layout, name, argv, deadline_s)
    if done.returncode != 0:
        raise MachineError(f"{name}: {' '.join(argv)} ended with {done.returncode}: {done.stdout.strip()}")
    return done.stdout


def run_in_foreground(layout: Layout, name: str, argv: Sequence[str]) -> int:
    """Run a command as if typed on that machine: same folder, environment, terminal; its exit status."""
    process = popen(layout, name, argv, cwd=Path.cwd())

    def forward(number: int, _frame: object) -> None:
        # A terminal sends these two to the command as well.
        if number in (signal.SIGINT, signal.SIGQUIT) and os.isatty(0):
            return
        process.send_signal(number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    code = process.wait()
    return code if code >= 0 else 128 - code
