"""Metrics of the processes' resource usage, of the nodes' times, and of the slowest node."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpc_grpo.system.usage import Usage
from hpc_grpo.types import GIB

NODE_PHASES = {"learner": "train", "engine": "sample"}
"""Kind of process -> its work in a step."""

_NODE_METRIC = re.compile(f"node/({'|'.join(NODE_PHASES.values())})_s/(.+)")
_NOTABLE_RATIO = 1.2
"""A node that takes at least this many times as long as the median is shown to the user."""

_FEWEST_STEPS = 5
_MAX_NAMED = 32


@dataclass(frozen=True)
class Reading:
    """A process's usage since the previous step; `index` counts the processes of its kind over all nodes."""

    kind: str
    index: int
    node: str
    usage: Usage


def usage_metrics(readings: Sequence[Reading]) -> dict[str, float]:
    """Return CPU cores, memory and GPU usage of every process, and the seconds of each node.

    Large runs get fewer metrics. A kind with more than 32 processes has only the sum of cores, the largest memory and
    the mean GPU utilization. Of more than 32 nodes, only the 32 slowest nodes have seconds.
    """
    sizes = Counter(reading.kind for reading in readings)
    processes: dict[str, list[Usage]] = defaultdict(list)
    nodes: dict[str, dict[str, float]] = defaultdict(dict)
    for reading in readings:
        is_named = sizes[reading.kind] <= _MAX_NAMED
        processes[f"{reading.kind}-{reading.index}" if is_named else f"{reading.kind}s"].append(reading.usage)
        if phase := NODE_PHASES.get(reading.kind):
            seconds = nodes[reading.node]
            seconds[phase] = max(seconds.get(phase, 0.0), reading.usage.busy_s)
    metrics: dict[str, float] = {}
    for name, usages in processes.items():
        metrics[f"process/cpu_cores/{name}"] = sum(each.cpu_s / each.wall_s for each in usages if each.wall_s)
        metrics[f"process/memory_gib/{name}"] = max(each.memory for each in usages) / GIB
        if on_gpu := [each.gpu_memory for each in usages if each.gpu_memory is not None]:
            metrics[f"process/gpu_memory_gib/{name}"] = max(on_gpu) / GIB
        if sampled := [each.gpu_utilization for each in usages if each.gpu_utilization is not None]:
            metrics[f"process/gpu_utilization/{name}"] = statistics.fmean(sampled)
    totals = {node: sum(seconds.values()) for node, seconds in nodes.items()}
    for node in sorted(totals, key=totals.__getitem__, reverse=True)[:_MAX_NAMED]:
        metrics |= {f"node/{phase}_s/{node}": seconds for phase, seconds in nodes[node].items()}
    return {**metrics, "node/median_s": statistics.median_low(totals.values())} if totals else metrics


def node_seconds(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the seconds of a step by node and phase: the time of the node's slowest learner or engine.

    >>> node_seconds({"node/train_s/a": 2.0, "node/sample_s/a": 5.0, "node/median_s": 3.0})
    {'a': {'train': 2.0, 'sample': 5.0}}
    """
    by_node: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in metrics.items():
        if (match := _NODE_METRIC.fullmatch(name)) and math.isfinite(value):
            by_node[match[2]][match[1]] = value
    return dict(by_node)


def slow_node(steps: Iterable[Mapping[str, float]]) -> str:
    """Return a text about the node whose learners and engines took longest over all steps; "" if it is not notable.

    Also returns "" for a single node, or fewer than five steps. With two nodes, the faster node serves as the median.
    """
    totals: dict[str, float] = defaultdict(float)
    median_s, num_steps = 0.0, 0
    for metrics in steps:
        seconds = node_seconds(metrics)
        num_steps += bool(seconds)
        median_s += metrics.get("node/median_s", 0.0)
        for node, phases in seconds.items():
            totals[node] += sum(phases.values())
    if num_steps < _FEWEST_STEPS or len(totals) < 2 or not median_s > 0:
        return ""
    name = max(totals, key=totals.__getitem__)
    ratio = totals[name] / median_s
    return f"node {name} takes {ratio:.2f} times as long as the others do" if ratio >= _NOTABLE_RATIO else ""
