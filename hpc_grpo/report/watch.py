"""Read what `hpc-grpo watch` shows of a run. Prints lines in a pipe; report/screen.py draws it in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_grpo.metrics.record import PASS_AT_1, REWARD, played
from hpc_grpo.report.samples import asked
from hpc_grpo.report.status import SILENT_S, RunRecords, RunSummary, is_over, read_records, summarize
from hpc_grpo.run.files import read_jsonl_from
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.readable import UNKNOWN, decimal, duration, number_or_none, short_number

REFRESH_S = 2.0
_KEPT_STEPS = 60
_READ_BYTES = 1 << 18
_LIMITS = {
    "tokens/truncated_fraction": (0.5, "half of the completions or more are cut off: {limits}"),
    "reward/zero_variance_fraction": (0.9, "few groups have rewards that differ: nothing is learned from the others"),
    "reward/invalid_fraction": (0.1, "a tenth of the rewards or more failed: hpc-grpo logs RUN"),
    "mismatch/logprob_abs_diff_mean": (0.1, "engines and learner disagree by 0.1 nats a token or more"),
}  # fmt: skip
"""Metric -> the value at which it becomes an alert, and the alert's text."""
_CUTS = "rollout.max_new_tokens"
_EPISODE_CUTS = f"environment.max_turns, environment.max_tokens, {_CUTS}"


@dataclass(frozen=True)
class Prompt:
    """A prompt of the last step, with the completions of the lowest and the highest reward."""

    asked: str
    answer: str
    worst: tuple[str, float | None]
    best: tuple[str, float | None]


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment. `steps` has the metrics of the last steps.

    `usual_s` is the last step's seconds in the run's current phase; None if unknown. `progress` has what the current
    step counts: its name, how many are done, and how many there are.
    """

    summary: RunSummary
    steps: list[dict[str, Any]]
    prompt: Prompt | None
    alerts: list[str]
    is_over: bool
    usual_s: float | None
    progress: list[tuple[str, int, int]]

    @property
    def headline(self) -> str:
        summary = self.summary
        problem = f": {summary.problem}" if summary.problem else ""
        return f"{summary.run}: {summary.state}, attempt {summary.attempt or UNKNOWN}{problem}"


def snapshot(run: RunDir) -> Snapshot:
    """Read the run, and only the end of its metrics and rollouts."""
    now = time.time()
    records = read_records(run)
    summary, state = summarize(records, now), records.state
    steps = _last_lines(run.metrics, "step")[-_KEPT_STEPS:]
    last = steps[-1] if steps else {}
    progress: list[tuple[str, int, int]] = []
    if state is not None and summary.in_step:
        progress = [
            ("groups sampled", state.sampled, state.num_groups),
            ("groups graded", state.graded, state.num_groups),
            ("microbatches trained", state.trained, state.num_microbatches),
        ]
    return Snapshot(
        summary,
        steps,
        _prompt(_last_lines(run.rollouts(state.step if state else 0), "completion")),
        find_alerts(records, summary, last),
        is_over(records, now),
        number_or_none(last.get(f"time/{records.owner.work}_s")) if records.owner and summary.doing else None,
        [(name, done, total) for name, done, total in progress if total],
    )


def find_alerts(records: RunRecords, summary: RunSummary, last: Mapping[str, Any]) -> list[str]:
    """Return the alerts; `last` has the metrics of the last step."""
    alerts = []
    if summary.heartbeat_age_s is not None and summary.heartbeat_age_s > SILENT_S / 2:
        alerts.append(f"no sign of life for {duration(summary.heartbeat_age_s)}")
    eta_s, walltime_s = summary.eta_s, summary.walltime_left_s
    if eta_s is not None and walltime_s is not None and eta_s > walltime_s and not records.waiting_job:
        alerts.append(f"no job waits to train the last {duration(eta_s - walltime_s)}: hpc-grpo submit RUN")
    alerts += [text for text in (summary.slow_node, summary.on_step) if text is not None]
    limits = _EPISODE_CUTS if "episode/turns" in last else _CUTS
    found = (text for name, (most, text) in _LIMITS.items() if (last.get(name) or 0.0) >= most)
    return alerts + [text.format(limits=limits) for text in found]


def watch_plainly(run: RunDir, sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Yield lines for a pipe or a file: the headline whenever it changes, and every step once."""
    last_headline, last_step = "", ""
    while True:
        now = snapshot(run)
        lines = [step_line(values) for values in now.steps]
        new = lines[lines.index(last_step) + 1 :] if last_step in lines else lines
        yield from new
        last_step = new[-1] if new else last_step
        if now.headline != last_headline:
            yield now.headline
        last_headline = now.headline
        if now.is_over:
            return
        sleep(REFRESH_S)


def measured(values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name and the key of the run's main metric. Before the first step only evals have one."""
    loss = ("loss", "loss/policy")
    return next((each for each in (("reward", REWARD), loss, ("pass@1", PASS_AT_1)) if each[1] in values), loss)


def seconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f} s"


def step_line(values: Mapping[str, Any]) -> str:
    """Return a step as a line of text; `values` are its metrics."""
    name, key = measured(values)
    tokens, took = short_number(values.get("throughput/tokens_per_s")), seconds(values.get("time/step_s"))
    return f"step {values['step']}  {name} {decimal(values.get(key))}  tokens/s {tokens}  took {took}"


def _prompt(rollouts: list[dict[str, Any]]) -> Prompt | None:
    """Return the last prompt whose completions have different rewards, else the last prompt."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for line in rollouts:
        groups.setdefault(line.get("ordinal"), []).append(line)
    shown: Prompt | None = None
    for own in groups.values():
        rewarded = ((number_or_none(line.get("reward")), line) for line in own)
        ranked = sorted(rewarded, key=lambda pair: float("-inf") if pair[0] is None else pair[0])
        (low, worst), (high, best) = ranked[0], ranked[-1]
        if shown is None or low != high or shown.worst[1] == shown.best[1]:
            answer = own[0].get("answer")
            said = "" if answer is None else str(answer)
            shown = Prompt(asked(str(own[0].get("prompt", ""))), said, (_text(worst), low), (_text(best), high))
    return shown


def _text(line: Mapping[str, Any]) -> str:
    return played(line["turns"]) if line.get("turns") else str(line["completion"])


def _last_lines(path: Path, key: str) -> list[dict[str, Any]]:
    """Return the complete lines with `key` in the last quarter MiB of a JSONL file."""
    begin = max(0, path.stat().st_size - _READ_BYTES) if path.exists() else 0
    return [values for _, values in read_jsonl_from(path, begin) if key in values]
