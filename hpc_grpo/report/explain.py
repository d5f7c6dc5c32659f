"""Explain what became of each attempt of a run, and what to do about it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.launch.place.slurm.text import own_lines
from hpc_grpo.report.advice import Advice, advise
from hpc_grpo.report.logs import DRIVER_LOG, attempt_dirs, tail
from hpc_grpo.report.records import RunRecords, ended_by_time_limit
from hpc_grpo.run.attempt import AttemptRecord
from hpc_grpo.run.last_error import last_error, reason_to_stop
from hpc_grpo.system.readable import UNKNOWN, duration, moment

_READ = {"num_lines": 400, "max_bytes": 1 << 16}
_END_LINES = 40
"""Lines at the end of a log in which patterns are searched for, where no error message has one."""

_DUE_TO = "DUE TO "
"""Slurm's words for a job that it cancelled by itself: the time limit, a node failure, preemption."""

_NO_ERROR = ("complete", "resumable", "stopped")
_WIDTH = 110


@dataclass(frozen=True)
class Explanation:
    """`kind` is the attempt's exit kind, or `walltime`, `killed` or `running`; `num_steps` is what it added to the run.

    `error` is the last error in its log, or why its driver stopped early; it may be "".
    """

    record: AttemptRecord
    kind: str
    duration_s: float | None
    num_steps: int | None
    error: str
    advice: Advice | None

    def __str__(self) -> str:
        record = self.record
        gained = UNKNOWN if self.num_steps is None else f"{self.num_steps}, from step {record.first_step}"
        code = "" if record.exit_code is None else f" (exit code {record.exit_code})"
        running = f"not yet: {record.signalled} asked it to" if record.signalled else "not yet: it is running"
        is_repeated = "\n" not in self.error and self.error.removeprefix("error: ").rstrip(".") in record.why
        fields = [
            ("time", f"{moment(record.started_at)}, for {duration(self.duration_s)}"),
            ("nodes", f"{len(record.nodes)}: {', '.join(record.nodes) or UNKNOWN}"),
            ("steps", gained),
            ("ended", running if self.kind == "running" else f"{self.kind}{code}"),
            ("why", record.why),
            *(("lost node", f"{node}: {why}") for node, why in record.lost_nodes.items()),
            *(("stood still", why) for why in record.late),
            *(("restarted", why) for why in record.restarts),
            ("said", "" if is_repeated else self.error),
        ]
        if self.advice is not None:
            fields += [("cause", self.advice.cause), ("what to do", self.advice.todo)]
        title = f"Attempt {record.attempt} (job {record.job_id})"
        return "\n".join([title, *(_field(name, text) for name, text in fields if text)])


def explain_attempts(records: RunRecords, now: float) -> list[Explanation]:
    """Explain every attempt in order, from the end of its logs; `now` is in unix seconds."""
    dirs = attempt_dirs(records.run)
    return [_explain(records, index, dirs.get(attempt.attempt), now) for index, attempt in enumerate(records.attempts)]


def unrecorded_attempts(records: RunRecords) -> list[Path]:
    """Return the folders of attempts whose attempt.json is missing or damaged."""
    recorded = {attempt.attempt for attempt in records.attempts}
    return [path for number, path in attempt_dirs(records.run).items() if number not in recorded]


def _explain(records: RunRecords, index: int, folder: Path | None, now: float) -> Explanation:
    record = records.attempts[index]
    is_running = records.is_running(record, now)
    sign = records.last_sign_of_life() if record is records.newest else None
    end = record.ended_at if record.ended_at is not None else now if is_running else sign
    printed = _printed_by_slurm(records, record.job_id)
    kind = "running" if is_running else _kind(record, sign, printed)
    log = tail(folder / DRIVER_LOG, **_READ) if folder else ""
    error, printed = (reason_to_stop(log), "") if kind in _NO_ERROR else (last_error(log), printed)
    texts = (printed, error, record.why, "\n".join(log.splitlines()[-_END_LINES:]))
    return Explanation(
        record=record,
        kind=kind,
        duration_s=None if end is None else end - record.started_at,
        num_steps=_num_steps(records, index),
        error=error or printed,
        advice=None if is_running else advise(kind, *texts, has_jobs=record.source == "slurm"),
    )


def _kind(record: AttemptRecord, sign: float | None, printed: str) -> str:
    """Return how an attempt ended: its record cannot say that it was killed, nor by whom."""
    if record.exit_kind in ("running", "cancelled") and ended_by_time_limit(record, sign):
        return "walltime"
    if record.was_killed_in_teardown and _DUE_TO not in printed:
        return "cancelled"
    if record.exit_kind != "running":
        return record.exit_kind
    return "node_lost" if record.lost_nodes else "killed"


def _num_steps(records: RunRecords, index: int) -> int | None:
    """Return by how many steps the run was further on after this attempt; steps that were lost again do not count."""
    record, state = records.attempts[index], records.state
    if index + 1 < len(records.attempts):
        return records.attempts[index + 1].first_step - record.first_step
    if state is None:
        return None
    return max(0, state.step - record.first_step) if state.attempt == record.attempt else 0


def _printed_by_slurm(records: RunRecords, job_id: str) -> str:
    """Return Slurm's own lines at the end of a job's output: the only trace of some kills."""
    path = records.job_output(job_id)
    try:
        lines = tail(path, **_READ).splitlines() if path.is_file() else []
    except OSError:  # the user may have put it anywhere
        return ""
    return "\n".join(own_lines(lines, job_id))[-2000:]


def _field(name: str, text: str) -> str:
    """Return a named field, wrapped; an error keeps its lines."""
    lines = text.splitlines()
    if name != "said":
        lines = [part for line in lines for part in (textwrap.wrap(line, _WIDTH, break_long_words=False) or [""])]
    return "\n".join([f"  {name:<11}{lines[0]}", *(f"{'':13}{line}" for line in lines[1:])])
