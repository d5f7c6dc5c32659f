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

from hpc_grpo.metrics.record import PASS_AT_1, REWARD, StepRecord
from hpc_grpo.system.readable import clock, short_number

_HISTORY_LINES = 5
_BAR_COLUMNS = 30

_ETA = "time/eta_s"
_NO_PHASES = ("time/step_s", _ETA)
_PHASE_NAMES = {"generate_wait": "generate"}


class ConsoleSink:
    """Shows every step. `console` is for tests; the default writes to standard output."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._console = console or Console()
        self._panel = _LivePanel(title, self._console) if self._console.is_terminal else None

    def write(self, record: StepRecord) -> None:
        if self._panel is not None:
            self._panel.show(record)
            return
        print(plain_line(record), file=self._console.file, flush=True)

    def close(self) -> None:
        if self._panel is not None:
            self._panel.close()


class _LivePanel:
    """Redraws in place at the bottom of the terminal; what others print scrolls by above it."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._history: deque[str] = deque(maxlen=_HISTORY_LINES)
        self._last_eval: tuple[int, float] | None = None
        self._live = Live(Text(f"{title}: starting"), console=console, auto_refresh=False)
        before = (sys.stdout, sys.stderr)
        self._live.start()
        # Log handlers hold the stream they were made with and would write into the panel: give them rich's.
        self._moved = _move_log_handlers(dict(zip(before, (sys.stdout, sys.stderr), strict=True)))

    def show(self, record: StepRecord) -> None:
        if PASS_AT_1 in record.metrics:
            self._last_eval = (record.step, record.metrics[PASS_AT_1])
        self._live.update(self._render(record), refresh=True)
        self._history.append(plain_line(record))

    def close(self) -> None:
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved = []
        self._live.stop()

    def _render(self, record: StepRecord) -> RenderableType:
        progress = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=record.total_steps, completed=record.step, width=_BAR_COLUMNS)
        progress.add_row(position(record), bar, f"{record.step}/{record.total_steps}")
        numbers = Table.grid(padding=(0, 3))
        numbers.add_row(*(f"[dim]{label}[/] [bold]{value}[/]" for label, value in self._numbers(record)))
        shares = Table.grid(padding=(0, 1))
        for name, share in time_shares(record.metrics).items():
            bar = ProgressBar(total=1.0, completed=share, width=_BAR_COLUMNS)
            shares.add_row(name, bar, f"{share:.0%}")
        history = Text("\n".join(self._history), style="dim", no_wrap=True, overflow="ellipsis")
        return Panel(Group(progress, numbers, shares, history), title=self._title, title_align="left")

    def _numbers(self, record: StepRecord) -> list[tuple[str, str]]:
        numbers = [(label, value) for label, value in headline(record) if label != "pass@1"]
        if self._last_eval is not None:
            step, solved = self._last_eval
            numbers.insert(1, (f"pass@1 at step {step}", f"{solved:.3f}"))
        return numbers


def _move_log_handlers(replacements: dict[TextIO, TextIO]) -> list[tuple[logging.StreamHandler[TextIO], TextIO]]:
    """Point the root logger's stream handlers at the replacements; returns each with its former stream."""
    moved = []
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream in replacements:
            moved.append((handler, handler.stream))
            handler.setStream(replacements[handler.stream])
    return moved


def plain_line(record: StepRecord) -> str:
    """Return one line for a log: place in the run, the numbers a reader looks for first, and where the time went."""
    line = " ".join([position(record), *(f"{label} {value}" for label, value in headline(record))])
    shares = " ".join(f"{name} {share:.0%}" for name, share in time_shares(record.metrics).items())
    return f"{line} | {shares}" if shares else line


def headline(record: StepRecord) -> list[tuple[str, str]]:
    """Return the few numbers of a step that are shown, as (label, text), without those it does not have."""
    metrics = record.metrics
    # The policy loss of GRPO is near zero by construction and tells nothing; that of SFT is all there is.
    quality = ("reward", REWARD, "{:.3f}") if REWARD in metrics else ("loss", "loss/policy", "{:.4f}")
    shown = []
    for label, name, form in (
        quality,
        ("pass@1", PASS_AT_1, "{:.3f}"),
        ("lag", "lag/mean", "{:g}"),
        ("mismatch", "mismatch/logprob_abs_diff_mean", "{:.0e}"),
    ):
        if name in metrics:
            shown.append((label, form.format(metrics[name])))
    if "throughput/tokens_per_s" in metrics:
        shown.append(("tokens/s", short_number(metrics["throughput/tokens_per_s"])))
    if _ETA in metrics:
        shown.append(("eta", clock(metrics[_ETA])))
    return shown


def position(record: StepRecord) -> str:
    """Return `Epoch 1/5 step 6/19 global step 6`; for the eval before the first step, `Epoch 1/5 global step 0`."""
    epoch = f"Epoch {record.epoch}/{record.total_epochs}"
    if record.step == 0:
        return f"{epoch} global step 0"
    return f"{epoch} step {record.step_in_epoch}/{record.steps_per_epoch} global step {record.step}"


def time_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return each phase's share of `time/step_s`, largest first; phases below half a percent are left out."""
    step_s = metrics.get("time/step_s", 0.0)
    if step_s <= 0:
        return {}
    shares = {}
    for name, seconds in metrics.items():
        if name.startswith("time/") and name.endswith("_s") and name not in _NO_PHASES:
            phase = name.removeprefix("time/").removesuffix("_s")
            shares[_PHASE_NAMES.get(phase, phase)] = seconds / step_s
    return {name: share for name, share in sorted(shares.items(), key=lambda kv: -kv[1]) if share >= 0.005}
