"""The folder of an attempt on its VM: the messages between `visit` and `runner`, and their signs of life.

| file        | written by | content |
|-------------|------------|---------|
| the folder  | visit      | the attempt has begun, or never will: the visit that creates the folder decides |
| spec.json   | visit      | what to run, on which GPUs, for how long without a visit |
| lease       | visit      | the machine's uptime at the last visit that a controller has committed |
| cancel      | visit      | the order to end the job, with a checkpoint |
| key.json    | visit      | the attempt and its machine: machines may share their homes |
| runner.json | runner     | its ProcessIdentity |
| output.log  | runner     | the job's output |
| exit.json   | runner     | how the job ended; or from `visit`, that it never began, or that the runner died |
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_grpo.fleet.messages import AttemptKey
from hpc_grpo.fleet.states import Ending
from hpc_grpo.run.files import from_known, read_record, write_record
from hpc_grpo.system.processes import ProcessIdentity

MARK = "HPC_GRPO_FLEET_ATTEMPT"
"""Variable of a job's processes with the attempt's folder. It identifies the processes after their runner died."""

CONFIG_FILE = "config.yaml"
"""Placeholder in a command for the spec's config. The runner writes the config into the attempt's folder."""

_KEPT_S = 7 * 86_400.0
_MARGIN_S = 30.0


class AttemptFolder:
    """Reads and writes the files of one attempt. Visit and runner may be killed between any two writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "output.log"
        self.runner = path / "runner.json"

    def make(self) -> bool:
        """Create the folder. Return False if it exists: another visit has started or revoked this attempt."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            return False
        return True

    def write_spec(self, spec: dict[str, Any]) -> None:
        write_record(self.path / "spec.json", spec)

    def spec(self) -> dict[str, Any] | None:
        return read_record(self.path / "spec.json", dict)

    def key(self) -> AttemptKey | None:
        """Return which attempt this is; None if no key was written into the folder."""
        return read_record(self.path / "key.json", lambda values: AttemptKey(values["job_id"], values["attempt"]))

    def write_key(self, key: AttemptKey) -> None:
        write_record(self.path / "key.json", {**key._asdict(), "visit": asdict(ProcessIdentity.of_this_process())})

    def is_of_this_machine(self) -> bool:
        """Return whether a visit to this machine made the attempt. Other machines may see the folder over NFS."""
        visit = read_record(self.path / "key.json", lambda values: from_known(ProcessIdentity)(values["visit"]))
        return visit is None or visit.is_on_this_machine

    def is_abandoned(self) -> bool:
        """Return whether another machine had the attempt, and its lease and its time for a checkpoint are over."""
        spec, lease = self.spec(), self.path / "lease"
        if spec is None or self.is_of_this_machine() or not lease.exists():
            return False
        return time.time() - lease.stat().st_mtime > float(spec["lease_s"]) + float(spec["end_s"]) + _MARGIN_S

    def renew(self, uptime: float) -> None:
        """Write the lease in place: its size never changes, so a full disk does not end the job."""
        descriptor = os.open(self.path / "lease", os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(f"{uptime:020.3f}".encode())

    def leased_at(self) -> float | None:
        try:
            return float((self.path / "lease").read_text())
        except (OSError, ValueError):
            return None

    def cancel(self) -> None:
        (self.path / "cancel").touch()

    def is_cancelled(self) -> bool:
        return (self.path / "cancel").exists()

    def write_runner(self) -> None:
        """Record this process as the runner."""
        write_record(self.runner, asdict(ProcessIdentity.of_this_process()))

    def runner_lives(self) -> bool:
        """Return whether the runner still runs. Call it only on the attempt's machine."""
        runner = read_record(self.runner, from_known(ProcessIdentity))
        return runner is not None and runner.is_on_this_host and runner.has_process

    def end(self, ending: Ending) -> None:
        write_record(self.path / "exit.json", asdict(ending))

    def retract(self) -> None:
        """Remove what `end` wrote."""
        (self.path / "exit.json").unlink(missing_ok=True)

    def ending(self) -> Ending | None:
        return read_record(self.path / "exit.json", from_known(Ending))


def prune(over: Path) -> None:
    """Delete attempts that ended a week ago. Skips files that it may not delete, so that the visit continues."""
    for path in over.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # another visit was first
            if time.time() - path.stat().st_mtime > _KEPT_S:
                shutil.rmtree(path, ignore_errors=True)


def uptime() -> float:
    """Return seconds since boot, including time of suspension. Nobody can set this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def marked_processes(folder: Path) -> list[int]:
    """Return the ids of living processes whose environment names the attempt in `folder`."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process is gone, or another user's
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
