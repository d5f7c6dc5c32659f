"""metrics.jsonl: one line per step, append-only, always on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.run.paths import drop_torn_line, read_jsonl
from hpc_grpo.run.space import when_there_is_space


class JsonlSink:
    """Appends `{"step", "attempt", "time", <metrics>}` and flushes.

    A step trained again after a resume gets a second line; readers take the last. A value that is not finite
    is written as null: JSON knows no NaN.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_torn_line(path)
        self._file = path.open("a")

    def write(self, record: StepRecord) -> None:
        values = {name: float(value) if math.isfinite(value) else None for name, value in record.metrics.items()}
        line = {"step": record.step, "attempt": record.attempt, "time": record.time_s, **values}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        when_there_is_space(self._file.flush, "metrics.jsonl")  # what did not fit stays in the buffer

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """The surviving line of every step, in ascending order; null reads as NaN. Empty without a file.

    An attempt's first line undoes the same and later steps of the attempts before it.
    """
    lines: dict[int, dict[str, Any]] = {}
    attempt = None
    for line in read_jsonl(path):
        if line["attempt"] != attempt:
            attempt = line["attempt"]
            lines = {step: kept for step, kept in lines.items() if step < line["step"]}
        lines[line["step"]] = line
    return {
        step: {name: math.nan if value is None else value for name, value in lines[step].items()}
        for step in sorted(lines)
    }
