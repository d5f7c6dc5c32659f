"""Processes of a run on this machine, by the ids that the run itself keeps, and what its driver is doing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from hpc_grpo.run.pulse import PULSES_NAME, Beat, read_pulse

ROLES = ("driver", "learner", "engine", "grader", "reward worker", "agent", "raylet")
PHASES = {"starting": "start", "sampling": "generate_wait", "training": "train", "publishing": "publish"}
"""What the table calls them -> the driver's word."""

_COMMANDS = {
    "reward worker": "hpc_grpo.grading.worker",
    "agent": "hpc_grpo.launch.agent.agent",
    "raylet": "raylet/raylet",
}


def driver_beat(supervisor: int) -> Beat:
    """What the driver of this supervisor shows, read where the supervisor reads it."""
    for link in Path(f"/proc/{supervisor}/fd").iterdir():
        if "memfd:pulse" in _target(link):
            descriptor = os.open(link, os.O_RDONLY)
            try:
                return read_pulse(descriptor)
            finally:
                os.close(descriptor)
    return Beat()


def pids(supervisor: int, role: str, run_dir: Path) -> list[int]:
    """The processes of one role below this supervisor."""
    root = psutil.Process(supervisor)
    if role == "driver":
        return [child.pid for child in root.children() if _command(child)[-1:] == [str(run_dir)]]
    below = {child.pid: child for child in root.children(recursive=True)}
    if role in _COMMANDS:
        return [pid for pid, child in below.items() if _COMMANDS[role] in " ".join(_command(child))]
    return [pid for folder in Path("/dev/shm").glob("hg-*") for pid in _pulses(folder, role) if pid in below]


def _pulses(folder: Path, role: str) -> Iterator[int]:
    for path in (folder / PULSES_NAME).glob(f"{role}-*-*"):
        yield int(path.name.split("-")[1])


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # gone, or about to be
        return []


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""
