"""The console: a live panel on a terminal, plain lines everywhere else (a job's log)."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpc_grpo.metrics.record import PASS_AT_1, REWARD, StepRecord, phase_seconds
from hpc_grpo.system.readable import clock, short_number

_HISTORY_LINES = 5
_BAR_COLUMNS = 30


class ConsoleSink:
    """Shows every step. `console` is for tests; the default writes to standard output.

    The panel is redrawn at the bottom of the terminal; other output scrolls by above it.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._console = console or Console()
        self._title = title
        self._history: deque[str] = deque(maxlen=_HISTORY_LINES)
        self._last_eval: tuple[int, float] | None = None
        self._moved: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(Text(f"{title}: starting"), console=self._console, auto_refresh=False)
            before = (sys.stdout, sys.stderr)
            self._live.start()
            # Log handlers keep their first stream and would write into the panel: give them rich's stream.
            replacements = dict(zip(before, (sys.stdout, sys.stderr), strict=True))
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream in replacements:
                    self._moved.append((handler, handler.stream))
                    handler.setStream(replacements[handler.stream])

    def write(self, record: StepRecord) -> None:
        if PASS_AT_1 in record.metrics:
            self._last_eval = (record.step, record.metrics[PASS_AT_1])
        if self._live is None:
            print(plain_line(record), file=self._console.file, flush=True)
        else:
            self._live.update(self._panel(record), refresh=True)
        self._history.append(plain_line(record))

    def close(self) -> None:
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved = []
        if self._live is not None:
            self._live.stop()

    def _panel(self, record: StepRecord) -> RenderableType:
        progress = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=record.total_steps, completed=record.step, width=_BAR_COLUMNS)
        progress.add_row(_position(record), bar)
        shown = [(label, value) for label, value in _headline(record) if label != "pass@1"]
        if self._last_eval is not None:
            step, solved = self._last_eval
            shown.insert(1, (f"pass@1 at step {step}", f"{solved:.3f}"))
        numbers = Table.grid(padding=(0, 3))
        numbers.add_row(*(f"[dim]{label}[/] [bold]{value}[/]" for label, value in shown))
        shares = Table.grid(padding=(0, 1))
        for name, share in _time_shares(record.metrics).items():
            shares.add_row(name, ProgressBar(total=1.0, completed=share, width=_BAR_COLUMNS), f"{share:.0%}")
        history = Text("\n".join(self._history), style="dim", no_wrap=True, overflow="ellipsis")
        return Panel(Group(progress, numbers, shares, history), title=self._title, title_align="left")


def plain_line(record: StepRecord) -> str:
    """Return one line for a log: the position in the run, the most important numbers, and the times of the phases."""
    line = " ".join([_position(record), *(f"{label} {value}" for label, value in _headline(record))])
    shares = " ".join(f"{name} {share:.0%}" for name, share in _time_shares(record.metrics).items())
    return f"{line} | {shares}" if shares else line


def _headline(record: StepRecord) -> list[tuple[str, str]]:
    """Return the main numbers of a step as (label, text), without missing numbers."""
    metrics = record.metrics
    # GRPO's policy loss is always near zero, so show the reward. SFT has only the loss.
    quality = ("reward", REWARD, "{:.3f}".format) if REWARD in metrics else ("loss", "loss/policy", "{:.4f}".format)
    rows = (
        quality,
        ("pass@1", PASS_AT_1, "{:.3f}".format),
        ("lag", "lag/mean", "{:g}".format),
        ("mismatch", "mismatch/logprob_abs_diff_mean", "{:.0e}".format),
        ("tokens/s", "throughput/tokens_per_s", short_number),
        ("eta", "time/eta_s", clock),
    )
    return [(label, form(metrics[name])) for label, name, form in rows if name in metrics]


def _position(record: StepRecord) -> str:
    return f"Step {record.step}/{record.total_steps} epoch {record.epoch}/{record.total_epochs}"


def _time_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return each phase's share of `time/step_s`, largest first, without phases below half a percent."""
    step_s = metrics.get("time/step_s", 0.0)
    shares = {phase: seconds / step_s for phase, seconds in phase_seconds(metrics).items() if step_s > 0}
    return {name: share for name, share in sorted(shares.items(), key=lambda kv: -kv[1]) if share >= 0.005}
