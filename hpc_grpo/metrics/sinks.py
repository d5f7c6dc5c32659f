"""Where metrics go. The driver hands every sink one record per step and closes them at the end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Protocol

from hpc_grpo.config import Config
from hpc_grpo.metrics.console import ConsoleSink
from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.metrics.wandb import WandbSink, wandb_mode
from hpc_grpo.run.files import drop_torn_line, when_there_is_space
from hpc_grpo.run.paths import RunDir


class MetricSink(Protocol):
    def write(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


def make_sinks(config: Config, run_dir: RunDir) -> list[MetricSink]:
    """The sinks of `config`, metrics.jsonl first: it is the one the others may not keep from its line."""
    sinks: list[MetricSink] = [JsonlSink(run_dir.metrics)]
    mode = wandb_mode(config.metrics)
    if mode is not None:
        sinks.append(WandbSink(config, run_dir, mode))
    if config.metrics.tensorboard:
        sinks.append(TensorBoardSink(run_dir))
    return [*sinks, ConsoleSink(config.run.name)]


class JsonlSink:
    """Appends `{"step", "attempt", "time", <metrics>}` to metrics.jsonl and flushes; always on.

    A step trained again after a resume gets a second line; readers take the last. A value that is not finite is
    written as null: JSON knows no NaN.
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


class TensorBoardSink:
    """Event files below the run directory; one more per attempt, merged by TensorBoard."""

    def __init__(self, run_dir: RunDir) -> None:
        # Imported here: it loads torch and tensorboard, which only those who ask for it should pay.
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run_dir.tensorboard))

    def write(self, record: StepRecord) -> None:
        for name, value in record.metrics.items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time_s)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
