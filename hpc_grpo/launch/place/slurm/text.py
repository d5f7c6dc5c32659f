"""Slurm's commands and their output: run a command, and parse values from its text."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence

from hpc_grpo.errors import LaunchError
from hpc_grpo.system.commands import run_command

_TIMEOUT_S = 60.0
FINAL_STATES = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"]
)
OVER_STATES = FINAL_STATES | {"COMPLETING", "REVOKED"}
"""A job in any other state may run again, even a held job: REQUEUE_HOLD, RESV_DEL_HOLD."""

_NAMED_JOB = re.compile(r"\b(?:JOB |STEP |StepId=)(\d+)")


def output_of(argv: Sequence[str], *, deadline_s: float = _TIMEOUT_S) -> str:
    """Return the output of a Slurm command. Raises LaunchError with the command's message."""
    # The user's settings for these commands could filter jobs, or change the format of times.
    settings = ("SQUEUE_", "SACCT_", "SCONTROL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    answer = run_command(argv, deadline_s, environ={**kept, "SLURM_TIME_FORMAT": "standard"})
    if answer.error:
        raise LaunchError(f"{' '.join(argv)} failed: {answer.said or answer.error}")
    return answer.text


def fields(record: str) -> dict[str, str]:
    """Return the fields of `scontrol show`, by Slurm's names; "(null)" and "N/A" are left out.

    >>> fields("JobId=7 JobState=RUNNING Account=(null) NumNodes=2-2")
    {'JobId': '7', 'JobState': 'RUNNING', 'NumNodes': '2-2'}
    """
    found = re.findall(r"(?:^|\s)([A-Za-z:/]+)=((?:(?<=StdOut=)|(?<=Command=)).*|\S*)", record)
    return {key: value for key, value in found if value not in ("(null)", "N/A", "")}


def records(shown: str) -> list[dict[str, str]]:
    """Return the fields of each record. An array or a heterogeneous job has several records."""
    return [fields(record) for record in re.split(r"\n\s*\n", shown.strip())]


def own_lines(printed: Sequence[str], job_id: str) -> list[str]:
    """Return the lines that Slurm itself printed about a job. Several jobs may append to one file.

    A task of an array has its own file, in which Slurm names the task by another number.
    """
    own = (line for line in printed if line.startswith(("slurmstepd", "srun: error")))
    return [line for line in own if "_" in job_id or (named := _NAMED_JOB.search(line)) is None or named[1] == job_id]


def hostnames(node_list: str, ask: Callable[[Sequence[str]], str] = output_of) -> list[str]:
    """Return the names in a Slurm node list such as nid[001-004], by scontrol. Raises LaunchError."""
    return ask(["scontrol", "show", "hostnames", node_list]).split()


def unix_time(text: str) -> float | None:
    """Return the unix time of a local time in Slurm's output; None for "N/A", "Unknown" and the like."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def minutes(limit: str) -> int | None:
    """Return a time limit, in any of Slurm's formats, in minutes, rounded up; None for "UNLIMITED" and the like.

    >>> [minutes(limit) for limit in ("30", "90:30", "2:00:00", "1-2", "1-2:30", "1-02:00:30")]
    [30, 91, 120, 1560, 1590, 1561]
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if match is None:
        return None
    days, *given = match.groups()
    parts = [int(part) for part in given if part is not None]
    if days is None and len(parts) < 3:
        parts = [0, *parts]  # without days, hours come with seconds only
    hours, mins, secs = [*parts, 0, 0][:3]
    return (int(days or 0) * 24 + hours) * 60 + mins + -(-secs // 60)


def counts_per_node(text: str, num_nodes: int) -> tuple[int, ...]:
    """Expand Slurm's run-length form to one number for each node.

    Repeats the first number if the text does not have `num_nodes` numbers. Raises LaunchError for another form.

    >>> counts_per_node("72(x2),36", 3)
    (72, 72, 36)
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise LaunchError(f"SLURM_JOB_CPUS_PER_NODE = {text!r} is not in a known form.")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts) if len(counts) == num_nodes else (counts[0],) * num_nodes


def granted_gpus(tres: str) -> str:
    """Return the number of GPUs in a TRES list, as Slurm writes it; "" if none. Some sites count GPUs only by type.

    >>> granted_gpus("cpu=16,mem=250G,gres/gpu:a=4,gres/gpu=8"), granted_gpus("gres/gpu:gh200=8")
    ('8', '8')
    """
    found = dict(entry.split("=", 1) for entry in tres.split(",") if "=" in entry)
    typed = next((amount for key, amount in found.items() if key.startswith("gres/gpu:")), "")
    return found.get("gres/gpu", typed)
