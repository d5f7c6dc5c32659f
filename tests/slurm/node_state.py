"""What a job has on one node: `python node_state.py JOB_ID < NEEDLES` prints it as JSON.

NEEDLES are words that must be nowhere: in no argument of any process on the node, in no file of the job.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

_FOLDERS = (Path("/tmp"), Path("/dev/shm"))


def is_of_job(process: psutil.Process, job_id: str) -> bool:
    """By Slurm's variable, or by a file of the job that it has open (Ray's titles overwrite the variables)."""
    try:
        if process.environ().get("SLURM_JOB_ID") == job_id:
            return True
        opened = [descriptor.readlink() for descriptor in Path(f"/proc/{process.pid}/fd").iterdir()]
    except (psutil.Error, OSError):
        return False
    return any(f"/hg-{job_id}-" in str(path) for path in opened)


def members(job_id: str) -> list[psutil.Process]:
    """The job's processes and all their descendants."""
    found = {process.pid: process for process in psutil.process_iter() if is_of_job(process, job_id)}
    for process in list(found.values()):
        try:
            found |= {child.pid: child for child in process.children(recursive=True)}
        except psutil.Error:
            continue
    return list(found.values())


def title_of(process: psutil.Process) -> str:
    """The command line; "" of a process that is over."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def listening(process: psutil.Process) -> Iterator[dict[str, Any]]:
    title = title_of(process)
    try:
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                yield {"title": title, "ip": connection.laddr.ip, "port": connection.laddr.port}
    except psutil.Error:
        return


def commands() -> Iterator[tuple[str, str]]:
    """Where, and the arguments: of every process of the node."""
    for process in psutil.process_iter():
        yield f"argv of {process.pid}", title_of(process)


def places_of(needles: list[str], folders: list[Path]) -> list[str]:
    """Each place that holds one of the needles."""
    found = [where for where, text in commands() if any(needle in text for needle in needles)]
    # os.walk passes over a folder that goes in the meantime, where rglob raises.
    entries = (entry for folder in folders for entry in os.walk(folder))
    for path in (Path(folder, name) for folder, _, names in entries for name in names):
        try:
            content = path.read_bytes() if path.is_file() else b""
        except FileNotFoundError:
            continue
        found += [str(path) for needle in needles if needle.encode() in content]
    return found


def main() -> None:
    job_id = sys.argv[1]
    folders = [path for folder in _FOLDERS for path in folder.glob(f"hg-{job_id}-*")]
    processes = members(job_id)
    state = {
        "processes": [title for process in processes if (title := title_of(process))],
        "listening": [entry for process in processes for entry in listening(process)],
        "folders": sorted(map(str, folders)),
        "shared_memory": sorted(path.name for path in Path("/dev/shm").iterdir()),
        "needles": places_of(sys.stdin.read().split(), folders),
    }
    print(json.dumps(state))


if __name__ == "__main__":
    main()
