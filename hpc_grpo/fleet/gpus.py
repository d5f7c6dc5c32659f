"""Read the GPUs of a VM, and how much of each is used, as its nvidia-smi tells them."""

from __future__ import annotations

from hpc_grpo.fleet.messages import GpuSeen
from hpc_grpo.system.commands import run_command

_NVIDIA_SMI_S = 7.0
"""Twice that is less than `visit_s`: the jobs of a VM whose nvidia-smi hangs must not end for want of visits."""
_GPU_FIELDS = "index,uuid,memory.total,memory.used"


class NoGpusError(Exception):
    """nvidia-smi does not tell."""


def read_gpus(command: str) -> tuple[GpuSeen, ...]:
    """Ask nvidia-smi, which `command` names. Raises NoGpusError where it does not tell."""
    listed = _ask(command, f"--query-gpu={_GPU_FIELDS}")
    used = _ask(command, "--query-compute-apps=gpu_uuid,pid")
    owners = [line.split(",")[0].strip() for line in used.splitlines() if line.strip()]
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.strip()]
    try:
        return tuple(
            GpuSeen(int(index), uuid, int(total), int(in_use), owners.count(uuid))
            for index, uuid, total, in_use in rows
        )
    except ValueError:
        raise NoGpusError(f"{command} answered what is no list of GPUs: {listed[:200]!r}") from None


def _ask(command: str, query: str) -> str:
    answer = run_command([command, query, "--format=csv,noheader,nounits"], _NVIDIA_SMI_S)
    if answer.error:
        raise NoGpusError(answer.error)
    return answer.text
