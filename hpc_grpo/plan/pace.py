"""How long a run still takes, from the steps it has taken. Before the first one nobody knows, and none is made up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_STEP_TIME = "time/step_s"


@dataclass(frozen=True)
class MeasuredPace:
    """The newest attempt's steps. `num_nodes` is what they ran on; None where the attempt's record is gone."""

    median_step_s: float
    num_steps: int
    attempt: int
    num_nodes: int | None
    num_remaining_steps: int | None

    def node_hours_left(self, planned_nodes: int) -> float | None:
        """Steps x seconds x nodes / 3600, on the nodes measured; None where the run's length is not known."""
        if self.num_remaining_steps is None:
            return None
        nodes = self.num_nodes or planned_nodes
        return self.num_remaining_steps * self.median_step_s * nodes / 3600


def measured_pace(
    metrics: Mapping[int, Mapping[str, Any]], nodes_by_attempt: Mapping[int, int], total_steps: int | None
) -> MeasuredPace | None:
    """The pace of the newest attempt in `metrics` (of metrics.jsonl, by step); None when no step was measured."""
    timed = {step: line for step, line in metrics.items() if step > 0 and math.isfinite(line.get(_STEP_TIME, math.nan))}
    if not timed:
        return None
    last_step = max(timed)
    attempt = int(timed[last_step].get("attempt", 1))
    seconds = [line[_STEP_TIME] for line in timed.values() if line.get("attempt", 1) == attempt]
    remaining = None if total_steps is None else max(0, total_steps - last_step)
    return MeasuredPace(statistics.median(seconds), len(seconds), attempt, nodes_by_attempt.get(attempt), remaining)
