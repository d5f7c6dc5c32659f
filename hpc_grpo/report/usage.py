"""Draw what nodes and processes of a run took: the seconds of a step by node, cores, memory and GPUs by process."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from hpc_grpo.metrics.usage import node_seconds
from hpc_grpo.report.curves import curve_of
from hpc_grpo.report.drawings import Picture, draw_curves, draw_shares

_MAX_NODES = 16
_MAX_PROCESSES = 14
_UNITS = {
    "cpu_cores": "CPU cores",
    "memory_gib": "memory in GiB",
    "gpu_memory_gib": "GPU memory in GiB",
    "gpu_utilization": "GPU utilization",
}


def draw_nodes(run: str, metrics: Mapping[int, dict[str, Any]]) -> list[Picture]:
    """Draw the mean seconds of a step that nodes took, the slowest first; none of a run that has recorded none."""
    totals: dict[str, dict[str, list[float]]] = {}
    for line in metrics.values():
        for node, seconds in node_seconds(line).items():
            for phase, spent in seconds.items():
                totals.setdefault(node, {}).setdefault(phase, []).append(spent)
    means = {node: {phase: fmean(own) for phase, own in phases.items()} for node, phases in totals.items()}
    slowest = sorted(means, key=lambda node: -sum(means[node].values()))[:_MAX_NODES]
    return [draw_shares(f"{run}: seconds of a step by node", {n: means[n] for n in slowest})] if slowest else []


def draw_processes(run: str, metrics: dict[int, dict[str, Any]]) -> list[Picture]:
    """Draw the cores, the memory and the GPUs that a run's processes use, of those that use most."""
    pictures = []
    for unit, title in _UNITS.items():
        start = f"process/{unit}/"
        names = {name for line in metrics.values() for name in line if name.startswith(start)}
        found = [curve for name in sorted(names) if (curve := curve_of(name, metrics)).steps]
        largest = sorted(found, key=lambda curve: -fmean(curve.values))[:_MAX_PROCESSES]
        if largest:
            # By name, so that a process has the same colour in all pictures.
            curves = {curve.name.removeprefix(start): curve for curve in sorted(largest, key=lambda curve: curve.name)}
            pictures.append(draw_curves(f"{run}: {title} by process", curves))
    return pictures
