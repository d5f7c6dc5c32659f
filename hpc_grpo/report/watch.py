"""Watch a run: its summary and its last steps, again and again until it is over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_grpo.metrics.record import REWARD, played
from hpc_grpo.report.logs import tail
from hpc_grpo.report.status import SILENT_S, RunRecords, RunSummary, is_over, read_records, summarize
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_state
from hpc_grpo.system.readable import UNKNOWN, decimal, duration, number_or_none, one_line, printable, short_number

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_REFRESH_S = 2.0
_SHOWN_STEPS = 8
_SHOWN_ROLLOUTS = 5
_FRAME_LINES = 2
_READ_BYTES = 1 << 18
_LIMITS = {
    "tokens/truncated_fraction": (0.5, "half of the completions or more are cut off: {limits}"),
    "reward/zero_variance_fraction": (
        0.9, "hardly a group has rewards that differ: nothing is learned from the others"
    ),
    "reward/invalid_fraction": (0.1, "a tenth of the rewards or more failed: hpc-grpo logs RUN"),
    "mismatch/logprob_abs_diff_mean": (0.1, "engines and learner disagree by 0.1 nats a token or more"),
}  # fmt: skip
"""By metric: the value from which on it deserves a look, and what is said."""
_CUTS = "rollout.max_new_tokens"
_EPISODE_CUTS = f"environment.max_turns, environment.max_tokens, {_CUTS}"


@dataclass(frozen=True)
class Snapshot:
    summary: RunSummary
    steps: list[str]
    rollouts: list[str]
    alerts: list[str]
    is_over: bool

    @property
    def headline(self) -> str:
        summary = self.summary
        problem = f": {summary.problem}" if summary.problem else ""
        return f"{summary.run}: {summary.state}, attempt {summary.attempt or UNKNOWN}{problem}"


def snapshot(run: RunDir) -> Snapshot:
    """Read the run, of its metrics and rollouts only the end."""
    now = time.time()
    records, state = read_records(run), read_state(run)
    summary = summarize(records, now)
    steps = _last_lines(run.metrics, _SHOWN_STEPS, "step")
    rollouts = _last_lines(run.rollouts(state.step if state else 0), _SHOWN_ROLLOUTS, "completion")
    return Snapshot(
        summary,
        [_step_line(values) for values in steps],
        [f"{decimal(number_or_none(own.get('reward')))}  {one_line(_text(own), 200)}" for own in rollouts],
        find_alerts(records, summary, steps[-1] if steps else {}),
        is_over(records, now),
    )


def find_alerts(records: RunRecords, summary: RunSummary, last: Mapping[str, Any]) -> list[str]:
    """Return what deserves a look; `last` has the metrics of the last step."""
    alerts = []
    if summary.heartbeat_age_s is not None and summary.heartbeat_age_s > SILENT_S / 2:
        alerts.append(f"no sign of life for {duration(summary.heartbeat_age_s)}")
    if any("does not" in line for line in _length(summary)) and not records.waiting_job:
        alerts.append("no further job waits: when this one ends, hpc-grpo submit RUN carries on")
    if summary.slow_node is not None:
        alerts.append(summary.slow_node)
    limits = _EPISODE_CUTS if "episode/turns" in last else _CUTS
    found = (text for name, (most, text) in _LIMITS.items() if (last.get(name) or 0.0) >= most)
    return alerts + [text.format(limits=limits) for text in found]


def _text(line: Mapping[str, Any]) -> str:
    return played(line["turns"]) if line.get("turns") else str(line["completion"])


def watch_plainly(run: RunDir, sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Yield lines for a pipe or a file: the headline whenever it changes, and every step once."""
    last_headline, last_step = "", ""
    for now in _snapshots(run, sleep):
        new = now.steps[now.steps.index(last_step) + 1 :] if last_step in now.steps else now.steps
        yield from new
        last_step = new[-1] if new else last_step
        if now.headline != last_headline:
            yield now.headline
        last_headline = now.headline


def watch_live(run: RunDir, console: Console, sleep: Callable[[float], None] = time.sleep) -> None:
    """Fill a terminal with the run, again and again in place, and leave the last view behind."""
    from rich.live import Live

    now = snapshot(run)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for now in _snapshots(run, sleep):
                live.update(view(now, console.height), refresh=True)
    finally:  # also after Ctrl+C, which is how most stop watching
        console.print(view(now, console.height))


def _snapshots(run: RunDir, sleep: Callable[[float], None]) -> Iterator[Snapshot]:
    while True:
        yield (now := snapshot(run))
        if now.is_over:
            return
        sleep(_REFRESH_S)


def view(now: Snapshot, height: int) -> RenderableType:
    """Lay out progress, alerts, the last steps and the last rollouts, in at most `height` lines."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def text(content: str, style: str = "") -> Text:
        return Text(printable(content), style, overflow="ellipsis", no_wrap=True)

    bar = Table.grid(expand=True)  # a bar alone ends no line
    bar.add_row(ProgressBar(total=now.summary.total_steps or 1, completed=now.summary.step or 0))
    head = [text(line) for line in (*now.summary.card(), *_length(now.summary))]
    whole: list[RenderableType] = [bar, *head, *(text(f"! {alert}", "bold") for alert in now.alerts)]
    top = whole[: max(1, height - _FRAME_LINES)]
    panels = [Panel(Group(*top), title="hpc-grpo watch", title_align="left")]
    left = height - len(top) - _FRAME_LINES
    for title, lines in (("last steps", now.steps), ("last rollouts", now.rollouts)):
        left -= max(1, len(lines)) + _FRAME_LINES
        if left < 0:
            break
        panels.append(Panel(text("\n".join(lines)), title=title, title_align="left"))
    return Group(*panels)


def _length(summary: RunSummary) -> list[str]:
    """Say whether the run ends within its allocation, or how much training is left for further ones."""
    eta_s, left_s = summary.eta_s, summary.walltime_left_s
    if eta_s is None or left_s is None:
        return []
    if eta_s <= left_s:
        return ["ends within this job"]
    return [f"does not end within this job: {duration(eta_s - left_s)} of training are left for the next ones"]


def _last_lines(path: Path, count: int, key: str) -> list[dict[str, Any]]:
    """Return the last whole lines of a JSONL file that have `key`."""
    found = []
    for line in tail(path, count + 1, _READ_BYTES).splitlines(keepends=True):
        try:
            values = json.loads(line) if line.endswith("\n") else None
        except ValueError:  # its beginning was not read
            continue
        if isinstance(values, dict) and key in values:
            found.append(values)
    return found[-count:]


def _step_line(values: Mapping[str, Any]) -> str:
    name, key = ("reward", REWARD) if REWARD in values else ("loss", "loss/policy")
    step_s = values.get("time/step_s")
    took = UNKNOWN if step_s is None else f"{step_s:.1f} s"
    tokens = short_number(values.get("throughput/tokens_per_s"))
    return f"step {values['step']}  {name} {decimal(values.get(key))}  tokens/s {tokens}  took {took}"
