"""The screens of `hpc-grpo watch`: all runs, one run live, and its log.

Files are read in threads: keys answer and seconds count while a file system stalls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Generic, TypeVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Sparkline, Static

from hpc_grpo.report.logs import DRIVER_LOG, attempt_dir, tail
from hpc_grpo.report.status import TITLES, RunSummary, read_records, summarize
from hpc_grpo.report.watch import REFRESH_S, Snapshot, measured, snapshot, step_line
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.readable import decimal, duration, fraction, number_or_none, one_line, printable, short_number
from hpc_grpo.system.say import undrawn

T = TypeVar("T")

_STALLED_S = 10.0
_BAR_WIDTH = 24
_LOG_LINES = 500
_MOST_TEXT = 2000


class _Live(Screen[None], Generic[T]):
    """A screen that reads files in a thread every 2 seconds. `tick` draws every second, with what was read last."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: T | None = None
        self.seen_at = time.monotonic()
        self._is_reading = False

    def on_mount(self) -> None:
        self.set_interval(REFRESH_S, self._begin_to_read)
        self.set_interval(1.0, self.tick)
        self._begin_to_read()

    def _begin_to_read(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            self.run_worker(self._read, thread=True)

    def _read(self) -> None:
        try:
            found = self.read()
        finally:
            self._is_reading = False
        self.app.call_from_thread(self._take, found)

    def _take(self, found: T) -> None:
        self.seen, self.seen_at = found, time.monotonic()
        self.show(found)
        self.tick()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.seen_at

    def read(self) -> T:
        raise NotImplementedError

    def show(self, seen: T) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        """Draw what changes every second."""


class RunsScreen(_Live[list[RunSummary]]):
    """All runs of a folder, one a line."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "app.quit", "quit"), Binding("enter", "open", "open the run")]

    def __init__(self, runs: Callable[[], Sequence[RunDir]]) -> None:
        super().__init__()
        self._runs = runs

    def compose(self) -> ComposeResult:
        yield DataTable[Text](cursor_type="row")
        yield Footer()

    def read(self) -> list[RunSummary]:
        return [summarize(read_records(run), time.time()) for run in self._runs()]

    def show(self, seen: list[RunSummary]) -> None:
        table = self._table
        if not table.columns:
            table.add_columns(*TITLES[:2], "doing", *TITLES[3:])
        chosen = table.cursor_row
        table.clear()
        for summary in seen:
            run, state, _, *others = summary.cells()
            doing = "" if summary.doing is None else f"{summary.doing} {duration(summary.doing_s)}"
            table.add_row(*(_plain(cell) for cell in (run, state, doing, *others)), key=summary.path)
        table.move_cursor(row=chosen)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        self.app.push_screen(RunScreen(RunDir(Path(event.row_key.value or "")), self._runs))

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one(DataTable)


class RunScreen(_Live[Snapshot]):
    """One run: where it is now, curves of the last steps, a prompt with its best and its worst completion."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "app.quit", "quit"),
        Binding("r,escape", "app.pop_screen", "all runs"),
        Binding("left", "neighbour(-1)", "previous run"),
        Binding("right", "neighbour(1)", "next run"),
        Binding("l", "log", "log"),
    ]

    def __init__(self, run: RunDir, runs: Callable[[], Sequence[RunDir]]) -> None:
        super().__init__()
        self._run, self._runs = run, runs

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with Horizontal(id="tiles"):
            for name in ("score", "tokens", "took"):
                with Vertical():
                    yield Static(id=f"{name}-text")
                    yield Sparkline([], summary_function=fmean, id=name)
        with Vertical(id="prompt", classes="box"):
            yield Static(id="asked")
            with Horizontal():
                yield Static(id="best")
                yield Static(id="worst")
        yield Static(id="steps", classes="box")
        yield Footer()

    def read(self) -> Snapshot:
        return snapshot(self._run)

    def show(self, seen: Snapshot) -> None:
        name, key = measured(seen.steps[-1] if seen.steps else {})
        self._tile("score", name, seen.steps, key, decimal)
        self._tile("tokens", "tokens/s", seen.steps, "throughput/tokens_per_s", short_number)
        self._tile("took", "step", seen.steps, "time/step_s", duration)
        prompt, steps = self.query_one("#prompt"), self.query_one("#steps", Static)
        steps.border_title = "last steps"
        steps.update(Text("\n").join(_plain(step_line(values)) for values in reversed(seen.steps)))
        prompt.display = seen.prompt is not None
        if seen.prompt is not None:
            answer = f"   (answer: {one_line(seen.prompt.answer, 60)})" if seen.prompt.answer else ""
            prompt.border_title = "a prompt of the last step"
            self.query_one("#asked", Static).update(_plain(f"{one_line(seen.prompt.asked, 300)}{answer}", "bold"))
            for name, (text, reward) in (("best", seen.prompt.best), ("worst", seen.prompt.worst)):
                own = _plain(f"{name} {decimal(reward)}  {one_line(text, _MOST_TEXT)}")
                self.query_one(f"#{name}", Static).update(own)

    def _tile(
        self, id: str, name: str, steps: Sequence[Mapping[str, Any]], key: str, spell: Callable[[float | None], str]
    ) -> None:
        values = [number for step in steps if (number := number_or_none(step.get(key))) is not None]
        self.query_one(f"#{id}", Sparkline).data = values
        since = f" from {spell(values[0])}" if len(values) > 1 else ""
        text = _plain(f"{name} {spell(values[-1] if values else None)}")
        self.query_one(f"#{id}-text", Static).update(text.append(since, "dim"))

    def tick(self) -> None:
        lines = [Text(f"Reading {self._run.path}", no_wrap=True)] if self.seen is None else _head(self.seen, self.age_s)
        if self.age_s > _STALLED_S:
            lines.append(Text(f"! the files of the run do not answer for {duration(self.age_s)}", "bold yellow"))
        self.query_one("#head", Static).update(Text("\n").join(lines))

    def action_neighbour(self, distance: int) -> None:
        runs = list(self._runs())
        at = runs.index(self._run) if self._run in runs else -1
        if runs:
            self.app.switch_screen(RunScreen(runs[(at + distance) % len(runs)], self._runs))

    def action_log(self) -> None:
        self.app.push_screen(LogScreen(self._run))


class LogScreen(_Live[str]):
    """The end of the driver's log."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "app.quit", "quit"),
        Binding("l,escape", "app.pop_screen", "back"),
    ]

    def __init__(self, run: RunDir) -> None:
        super().__init__()
        self._run = run

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static()
        yield Footer()

    def read(self) -> str:
        folder = attempt_dir(self._run, None)
        return "No attempt has started." if folder is None else undrawn(tail(folder / DRIVER_LOG, _LOG_LINES))

    def show(self, seen: str) -> None:
        log, is_new = self.query_one(VerticalScroll), self.query_one(Static)
        follows = log.is_vertical_scroll_end
        is_new.update(Text(printable(seen, longest_line=None)))
        if follows:
            log.scroll_end(animate=False)


class WatchApp(App[None]):
    """Shows `chosen`, or all `runs` where none is chosen."""

    TITLE = "hpc-grpo watch"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: auto; padding: 0 1; }
    #tiles { height: 3; padding: 0 1; }
    #tiles Vertical { width: 1fr; padding: 0 1 0 0; }
    Sparkline { height: 2; }
    .box { border: round $primary; padding: 0 1; }
    #prompt { height: 8; }
    #asked { height: auto; max-height: 2; }
    #prompt Static { width: 1fr; padding: 0 1 0 0; }
    #steps { height: 1fr; min-height: 3; }
    """

    def __init__(self, runs: Callable[[], Sequence[RunDir]], chosen: RunDir | None = None) -> None:
        super().__init__()
        self._runs, self._chosen = runs, chosen

    def on_mount(self) -> None:
        self.push_screen(RunsScreen(self._runs))
        if self._chosen is not None:
            self.push_screen(RunScreen(self._chosen, self._runs))


def _head(seen: Snapshot, age_s: float) -> list[Text]:
    """Return the lines above the curves; `age_s` seconds have passed since the run was read."""
    summary = seen.summary
    attempt = f"  attempt {summary.attempt}, job {summary.job_id}" if summary.attempt else ""
    lines = [_plain(summary.run, "bold").append(f"  {summary.state}").append(printable(attempt), "dim")]
    left = [f"{fraction(summary.step, summary.total_steps)} steps"]
    left += [f"{duration(summary.eta_s)} left"] if summary.eta_s is not None else []
    left += [f"this job has {duration(summary.walltime_left_s)}"] if summary.walltime_left_s is not None else []
    lines.append(_bar(summary.step or 0, summary.total_steps or 1).append(f" {', '.join(left)}"))
    if summary.doing is not None:
        now_s = None if summary.doing_s is None else summary.doing_s + age_s
        usual = "" if seen.usual_s is None else f" (last step: {duration(seen.usual_s)})"
        lines.append(_plain(f"now: {summary.doing} {duration(now_s)}{usual}", "bold green"))
    if seen.num_groups:
        for label, done in (("sampled", seen.sampled), ("graded", seen.graded)):
            lines.append(_bar(done, seen.num_groups).append(f" {done} of {seen.num_groups} groups {label}"))
    if summary.problem:
        lines.append(_plain(f"last problem: {one_line(summary.problem)}", "yellow"))
    return lines + [_plain(f"! {alert}", "bold yellow") for alert in seen.alerts]


def _bar(done: int, total: int) -> Text:
    filled = min(_BAR_WIDTH, round(_BAR_WIDTH * done / total))
    return (
        Text(no_wrap=True, overflow="ellipsis").append("━" * filled, "green").append("─" * (_BAR_WIDTH - filled), "dim")
    )


def _plain(text: str, style: str = "") -> Text:
    """Return text as it is: no markup, no control characters."""
    return Text(printable(text), style)
