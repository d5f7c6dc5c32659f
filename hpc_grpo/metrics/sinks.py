"""Where metrics go. The driver hands every sink one record per step and closes them at the end."""

from __future__ import annotations

from typing import Any, Protocol

from hpc_grpo.config.schema import Config
from hpc_grpo.metrics.console import ConsoleSink
from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.metrics.wandb import WandbSink, wandb_mode
from hpc_grpo.run.metrics import JsonlSink, read_metrics
from hpc_grpo.run.paths import RunDir

__all__ = ["MetricSink", "TensorBoardSink", "make_sinks", "read_metrics"]


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
