"""The screens of `hpc-grpo watch`: all runs, one run live, and its log.

Threads read the files, so keys and counters keep working while a file system stalls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import fmean
from threading import Thread
from typing import Any, ClassVar, Generic, TypeVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import DataTable, Footer, Sparkline, Static
from textual.widgets.data_table import RowKey

from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.report.logs import DRIVER_LOG, attempt_dir, tail
from hpc_grpo.report.status import TITLES, RunSummary, read_records, summarize
from hpc_grpo.report.watch import REFRESH_S, Snapshot, measured, seconds, snapshot, step_line
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.readable import decimal, duration, fraction, number_or_none, one_line, printable, short_number
from hpc_grpo.system.say import undrawn

T = TypeVar("T")

_LOOK_S = 0.1
_STALLED_S = 10.0
_BAR_WIDTH = 24
_LOG_LINES = 500
_MOST_TEXT = 2000


class _Live(Screen[None], Generic[T]):
    """A screen that reads files every 2 seconds, in a daemon thread: the user can leave while a file system stalls."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "app.quit", "quit")]

    def __init__(self, *parts: Widget) -> None:
        super().__init__()
        self._parts = parts
        self.seen: T | None = None
        self._seen_at = self._due_at = time.monotonic()
        self._reading: Future[T] | None = None

    def compose(self) -> ComposeResult:
        yield from self._parts
        yield Footer()

    def on_mount(self) -> None:
        self.set_interval(_LOOK_S, self._look)
        self.set_interval(1.0, self.tick)
        self._look()

    def _look(self) -> None:
        if not self.is_current:
            return
        if self._reading is None and time.monotonic() >= self._due_at:
            self._reading, self._due_at = Future(), time.monotonic() + REFRESH_S
            Thread(target=_fulfil, args=(self._reading, self.read), daemon=True).start()
        elif self._reading is not None and self._reading.done():
            done, self._reading = self._reading, None
            if not isinstance(done.exception(), OSError | HpcGrpoError):  # else the next look may succeed
                self.seen, self._seen_at = done.result(), time.monotonic()
                self.show(self.seen)
            self.tick()

    @property
    def age_s(self) -> float:
        """Return the seconds since the last read, or since the start without any read."""
        return time.monotonic() - self._seen_at

    def read(self) -> T:
        raise NotImplementedError

    def show(self, seen: T) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        """Draw the parts that change every second."""


def _fulfil(promise: Future[T], read: Callable[[], T]) -> None:
    try:
        promise.set_result(read())
    except Exception as error:  # noqa: BLE001 - raised again by the screen
        promise.set_exception(error)


class RunsScreen(_Live[list[RunSummary]]):
    """All runs of a folder, one per line."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "open", "open the run", priority=True)]

    def __init__(self, runs: Callable[[], Sequence[RunDir]]) -> None:
        self._table = DataTable[Text](cursor_type="row")
        super().__init__(self._table)
        self._runs = runs

    def read(self) -> list[RunSummary]:
        return [summarize(read_records(run), time.time()) for run in self._runs()]

    def show(self, seen: list[RunSummary]) -> None:
        table = self._table
        if not table.columns:
            table.add_columns(*TITLES[:2], "doing", *TITLES[3:])
        chosen = self._chosen
        table.clear()
        for summary in seen:
            run, state, _, *others = summary.cells()
            doing = "" if summary.doing is None else f"{summary.doing} {duration(summary.doing_s)}"
            table.add_row(*(_plain(cell) for cell in (run, state, doing, *others)), key=summary.path)
        if chosen in table.rows:
            table.move_cursor(row=table.get_row_index(chosen))

    @property
    def _chosen(self) -> RowKey | None:
        return [*self._table.rows][self._table.cursor_row] if self._table.row_count else None

    def action_open(self) -> None:
        self._table.action_select_cursor()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        self.app.push_screen(RunScreen(RunDir(Path(event.row_key.value or "")), self._runs))


class RunScreen(_Live[Snapshot]):
    """One run: its current state, curves of the last steps, a prompt with its best and its worst completion."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r,escape", "app.pop_screen", "all runs"),
        Binding("left", "neighbour(-1)", "previous run"),
        Binding("right", "neighbour(1)", "next run"),
        Binding("l", "log", "log"),
    ]

    def __init__(self, run: RunDir, runs: Callable[[], Sequence[RunDir]]) -> None:
        self._run, self._runs = run, runs
        self._head, self._steps = Static(id="head"), Static(id="steps", classes="box")
        self._steps.border_title = "last steps"
        self._asked, self._best, self._worst = Static(id="asked"), Static(), Static()
        self._prompt = Vertical(self._asked, Horizontal(self._best, self._worst), id="prompt", classes="box")
        self._prompt.border_title = "a prompt of the last step"
        self._score, self._tokens, self._took = _Tile(), _Tile(), _Tile()
        tiles = Horizontal(self._score, self._tokens, self._took, id="tiles")
        super().__init__(self._head, tiles, self._prompt, self._steps)

    def read(self) -> Snapshot:
        return snapshot(self._run)

    def show(self, seen: Snapshot) -> None:
        name, key = measured(seen.steps[-1] if seen.steps else {})
        self._score.show(name, [step.get(key) for step in seen.steps], decimal)
        self._tokens.show("tokens/s", [step.get("throughput/tokens_per_s") for step in seen.steps], short_number)
        self._took.show("step", [step.get("time/step_s") for step in seen.steps], seconds)
        self._steps.update(Text("\n").join(_plain(step_line(values)) for values in reversed(seen.steps)))
        self._prompt.display = seen.prompt is not None
        if seen.prompt is not None:
            answer = f"   (answer: {one_line(seen.prompt.answer, 60)})" if seen.prompt.answer else ""
            self._asked.update(_plain(f"{one_line(seen.prompt.asked, 300)}{answer}", "bold"))
            self._best.update(_rewarded("best", *seen.prompt.best))
            self._worst.update(_rewarded("worst", *seen.prompt.worst))

    def tick(self) -> None:
        lines = [_plain(f"Reading {self._run.path}")] if self.seen is None else _head(self.seen, self.age_s)
        if self.age_s > _STALLED_S:
            lines.append(Text(f"! the files of the run do not answer for {duration(self.age_s)}", "bold yellow"))
        self._head.update(Text("\n").join(lines))

    def action_neighbour(self, distance: int) -> None:
        runs = list(self._runs())
        at = runs.index(self._run) if self._run in runs else -1
        if runs:
            self.app.switch_screen(RunScreen(runs[(at + distance) % len(runs)], self._runs))

    def action_log(self) -> None:
        self.app.push_screen(LogScreen(self._run))


class _Tile(Vertical):
    """A metric: its last value, its first value, and a curve between."""

    def __init__(self) -> None:
        self._text, self._curve = Static(), Sparkline([], summary_function=fmean)
        super().__init__(self._text, self._curve)

    def show(self, name: str, values: Sequence[Any], spell: Callable[[float | None], str]) -> None:
        numbers = [number for value in values if (number := number_or_none(value)) is not None]
        self._curve.data = numbers
        since = f" from {spell(numbers[0])}" if len(numbers) > 1 else ""
        self._text.update(_plain(f"{name} {spell(numbers[-1] if numbers else None)}").append(since, "dim"))


class LogScreen(_Live[str]):
    """The end of the driver's log."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("l,escape", "app.pop_screen", "back")]

    def __init__(self, run: RunDir) -> None:
        self._text = Static()
        self._log = VerticalScroll(self._text)
        super().__init__(self._log)
        self._run = run

    def read(self) -> str:
        folder = attempt_dir(self._run, None)
        return "No attempt has started." if folder is None else undrawn(tail(folder / DRIVER_LOG, _LOG_LINES))

    def show(self, seen: str) -> None:
        follows = self._log.is_vertical_scroll_end
        self._text.update(_plain(seen))
        if follows:
            self._log.scroll_end(animate=False)


class WatchApp(App[None]):
    """Shows the `chosen` run, or all `runs` if none is chosen."""

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
    """Return the lines above the curves, `age_s` seconds after the run was read."""
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
    lines += [_bar(done, total).append(f" {done} of {total} {name}") for name, done, total in seen.progress]
    if summary.problem:
        lines.append(_plain(f"last problem: {one_line(summary.problem)}", "yellow"))
    return lines + [_plain(f"! {alert}", "bold yellow") for alert in seen.alerts]


def _rewarded(name: str, text: str, reward: float | None) -> Text:
    return _plain(f"{name} {decimal(reward)}  {one_line(text, _MOST_TEXT)}")


def _bar(done: int, total: int) -> Text:
    filled = min(_BAR_WIDTH, round(_BAR_WIDTH * done / total))
    bar = Text(no_wrap=True, overflow="ellipsis").append("━" * filled, "green")
    return bar.append("─" * (_BAR_WIDTH - filled), "dim")


def _plain(text: str, style: str = "") -> Text:
    """Show text as it is, without markup or control characters."""
    return Text(printable(text), style)
