"""Watch a run: its summary and its last steps, again and again until it is over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_grpo.metrics.record import REWARD
from hpc_grpo.report.logs import tail
from hpc_grpo.report.records import read_records
from hpc_grpo.report.status import card, is_over, summarize
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.readable import UNKNOWN, decimal, printable, short_number

if TYPE_CHECKING:
    from rich.console import Console

_REFRESH_S = 2.0
_SHOWN_STEPS = 8
_READ_BYTES = 1 << 18


@dataclass(frozen=True)
class Snapshot:
    card: list[str]
    headline: str
    steps: list[str]
    is_over: bool


def snapshot(run: RunDir) -> Snapshot:
    now = time.time()
    records = read_records(run)
    summary = summarize(records, now)
    problem = f": {summary.problem}" if summary.problem else ""
    headline = f"{summary.run}: {summary.state}, attempt {summary.attempt or UNKNOWN}{problem}"
    return Snapshot(card(summary), headline, last_steps(run), is_over(records, now))


def last_steps(run: RunDir, count: int = _SHOWN_STEPS) -> list[str]:
    """Return a line of text for each of the last steps; only the end of metrics.jsonl is read."""
    lines = tail(run.metrics, count + 1, _READ_BYTES).splitlines(keepends=True)
    read = (_parsed(line) for line in lines if line.endswith("\n"))
    return [_step_line(values) for values in read if values is not None][-count:]


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
    """Draw the run on a terminal, again and again in place."""
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, auto_refresh=False) as live:
        while True:
            now = snapshot(run)
            live.update(Text(printable("\n".join([*now.card, "", *now.steps]))), refresh=True)
            if now.is_over:
                return
            sleep(_REFRESH_S)


def _parsed(line: str) -> dict[str, Any] | None:
    """Return the metrics of a line, or None for a line whose beginning was not read."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and "step" in values else None


def _step_line(values: dict[str, Any]) -> str:
    name, key = ("reward", REWARD) if REWARD in values else ("loss", "loss/policy")
    step_s = values.get("time/step_s")
    took = UNKNOWN if step_s is None else f"{step_s:.1f} s"
    tokens = short_number(values.get("throughput/tokens_per_s"))
    return f"step {values['step']}  {name} {decimal(values.get(key))}  tokens/s {tokens}  took {took}"
