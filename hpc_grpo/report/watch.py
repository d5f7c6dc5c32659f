"""Watch a run: its summary and its last steps, again and again until it is over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_grpo.metrics.record import REWARD
from hpc_grpo.report.logs import tail
from hpc_grpo.report.records import SILENT_S, RunRecords, read_records
from hpc_grpo.report.status import RunSummary, card, is_over, summarize
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
_LIMITS = (
    ("tokens/truncated_fraction", 0.5, "half of the completions or more are cut off: rollout.max_new_tokens"),
    (
        "reward/zero_variance_fraction",
        0.9,
        "hardly a group has rewards that differ: nothing is learned from the others",
    ),
    ("reward/invalid_fraction", 0.1, "a tenth of the rewards or more failed: hpc-grpo logs RUN"),
    ("mismatch/logprob_abs_diff_mean", 0.1, "engines and learner disagree by 0.1 nats a token or more"),
)
"""A metric, from where on it deserves a look, and what is said."""


@dataclass(frozen=True)
class Snapshot:
    card: list[str]
    headline: str
    steps: list[str]
    is_over: bool
    summary: RunSummary
    alerts: list[str]


def snapshot(run: RunDir) -> Snapshot:
    now = time.time()
    records = read_records(run)
    summary = summarize(records, now)
    problem = f": {summary.problem}" if summary.problem else ""
    headline = f"{summary.run}: {summary.state}, attempt {summary.attempt or UNKNOWN}{problem}"
    values = _last_metrics(run, 1)
    alerts = _alerts(summary, records, values[-1] if values else {})
    return Snapshot(card(summary), headline, last_steps(run), is_over(records, now), summary, alerts)


def last_steps(run: RunDir, count: int = _SHOWN_STEPS) -> list[str]:
    """Return a line of text for each of the last steps; only the end of metrics.jsonl is read."""
    return [_step_line(values) for values in _last_metrics(run, count)]


def _last_metrics(run: RunDir, count: int) -> list[dict[str, Any]]:
    lines = tail(run.metrics, count + 1, _READ_BYTES).splitlines(keepends=True)
    read = (_parsed(line) for line in lines if line.endswith("\n"))
    return [values for values in read if values is not None][-count:]


def watch_plainly(run: RunDir, sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Yield lines for a pipe or a file: the headline whenever it changes, and every step once."""
    last_headline, last_step = "", ""
    while True:
        now = snapshot(run)
        new = now.steps[now.steps.index(last_step) + 1 :] if last_step in now.steps else now.steps
        yield from new
        last_step = new[-1] if new else last_step
        if now.headline != last_headline:
            yield now.headline
            last_headline = now.headline
        if now.is_over:
            return
        sleep(_REFRESH_S)


def watch_live(run: RunDir, console: Console, sleep: Callable[[float], None] = time.sleep) -> None:
    """Fill a terminal with the run, again and again in place, and leave the last view behind."""
    from rich.live import Live

    now = snapshot(run)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            live.update(view(run, now, console.height), refresh=True)
            while not now.is_over:
                sleep(_REFRESH_S)
                now = snapshot(run)
                live.update(view(run, now, console.height), refresh=True)
    finally:  # also after Ctrl+C, which is how most stop watching
        console.print(view(run, now, console.height))


def view(run: RunDir, now: Snapshot, height: int) -> RenderableType:
    """Lay out progress, alerts, the last steps and the last rollouts, in at most `height` lines."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    summary = now.summary
    bar = Table.grid(expand=True)  # a bar alone ends no line
    bar.add_row(ProgressBar(total=summary.total_steps or 1, completed=summary.step or 0))
    head = [Text(printable(line), overflow="ellipsis", no_wrap=True) for line in [*now.card, *_length(summary)]]
    alerts = [Text(f"! {printable(alert)}", "bold", overflow="ellipsis", no_wrap=True) for alert in now.alerts]
    lines_of_run: list[RenderableType] = [bar, *head, *alerts]
    top = lines_of_run[: max(1, height - _FRAME_LINES)]
    shown: list[RenderableType] = [Panel(Group(*top), title="hpc-grpo watch", title_align="left")]
    left = height - len(top) - _FRAME_LINES
    for title, lines in (("last steps", now.steps), ("last rollouts", last_rollouts(run))):
        if left < max(1, len(lines)) + _FRAME_LINES:
            break
        text = Text(printable("\n".join(lines)), overflow="ellipsis", no_wrap=True)
        shown.append(Panel(text, title=title, title_align="left"))
        left -= max(1, len(lines)) + _FRAME_LINES
    return Group(*shown)


def last_rollouts(run: RunDir, count: int = _SHOWN_ROLLOUTS) -> list[str]:
    """Return a line for each of the last rollouts on disk: reward, and the completion's beginning."""
    state = read_state(run)
    path = run.rollouts(state.step if state else 0)
    lines = tail(path, count, _READ_BYTES).splitlines() if path.exists() else []
    read = [values for line in lines if (values := _parsed(line, "completion"))]
    rewards = [decimal(number_or_none(values.get("reward"))) for values in read]
    return [f"{reward}  {one_line(str(own['completion']), 200)}" for reward, own in zip(rewards, read, strict=True)]


def _length(summary: RunSummary) -> list[str]:
    """Say whether the run ends within its allocation, or how many such stretches more it takes."""
    eta_s, left_s = summary.eta_s, summary.walltime_left_s
    if eta_s is None or left_s is None:
        return []
    if eta_s <= left_s:
        return ["ends within this job"]
    return [f"does not end within this job: {duration(eta_s - left_s)} of training are left for the next ones"]


def _alerts(summary: RunSummary, records: RunRecords, values: Mapping[str, Any]) -> list[str]:
    """Say what deserves a look; `values` are the last step's metrics."""
    alerts = []
    silent_s = summary.heartbeat_age_s
    if silent_s is not None and silent_s > SILENT_S / 2:
        alerts.append(f"no sign of life for {duration(silent_s)}")
    length = _length(summary)
    if length and "does not" in length[0] and not records.waiting_job:
        alerts.append("no further job waits: when this one ends, hpc-grpo resume RUN carries on")
    if summary.slow_node is not None:
        alerts.append(summary.slow_node)
    alerts += [text for name, limit, text in _LIMITS if (values.get(name) or 0.0) >= limit]
    return alerts


def _parsed(line: str, key: str = "step") -> dict[str, Any] | None:
    """Return what a line holds, or None for one without `key`, or whose beginning was not read."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and key in values else None


def _step_line(values: dict[str, Any]) -> str:
    name, key = ("reward", REWARD) if REWARD in values else ("loss", "loss/policy")
    step_s = values.get("time/step_s")
    took = UNKNOWN if step_s is None else f"{step_s:.1f} s"
    tokens = short_number(values.get("throughput/tokens_per_s"))
    return f"step {values['step']}  {name} {decimal(values.get(key))}  tokens/s {tokens}  took {took}"
