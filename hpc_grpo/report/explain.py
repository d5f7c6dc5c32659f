"""Explain what became of each attempt of a run, and what to do about it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.launch.place.slurm.text import own_lines
from hpc_grpo.report.advice import Advice, advise
from hpc_grpo.report.logs import DRIVER_LOG, attempt_dirs, job_output, tail
from hpc_grpo.report.records import RunRecords, ended_by_time_limit
from hpc_grpo.run.attempt import AttemptRecord
from hpc_grpo.run.last_error import last_error, reason_to_stop
from hpc_grpo.system.readable import UNKNOWN, duration, moment

_READ_BYTES = 1 << 16
_READ_LINES = 400
_END_LINES = 40
"""Patterns are searched for in so many lines at the end of a log, when no error message has one."""

_DUE_TO = "DUE TO "
"""Slurm says it of a job that it cancelled by itself: the time limit, a node failure, preemption."""

_NO_ERROR = ("complete", "stopped", "resumable")
_WIDTH = 110


@dataclass(frozen=True)
class Explanation:
    """Explain one attempt.

    `kind` is its exit kind, or `walltime`, `killed` or `running`; `num_steps` is what it added to the run. `error` is
    the last error in its log, or why its driver stopped early; it may be "".
    """

    record: AttemptRecord
    kind: str
    duration_s: float | None
    num_steps: int | None
    error: str
    advice: Advice | None


def explain_attempts(records: RunRecords, now: float) -> list[Explanation]:
    """Explain every attempt in order, from the end of its logs; `now` is in unix seconds."""
    dirs = attempt_dirs(records.run)
    return [_explain(records, index, dirs.get(attempt.attempt), now) for index, attempt in enumerate(records.attempts)]


def unrecorded_attempts(records: RunRecords) -> list[Path]:
    """Return the folders of attempts whose attempt.json is missing or damaged."""
    recorded = {attempt.attempt for attempt in records.attempts}
    return [path for number, path in attempt_dirs(records.run).items() if number not in recorded]


def explanation_text(explanation: Explanation) -> str:
    record = explanation.record
    nodes = ", ".join(record.nodes) or UNKNOWN
    gained = UNKNOWN if explanation.num_steps is None else f"{explanation.num_steps}, from step {record.first_step}"
    code = "" if record.exit_code is None else f" (exit code {record.exit_code})"
    fields = [
        ("time", f"{moment(record.started_at)}, for {duration(explanation.duration_s)}"),
        ("nodes", f"{len(record.nodes)}: {nodes}"),
        ("steps", gained),
        ("ended", _not_yet(record) if explanation.kind == "running" else f"{explanation.kind}{code}"),
        ("why", record.why),
        *(("lost node", f"{node}: {why}") for node, why in record.lost_nodes.items()),
        *(("stood still", why) for why in record.late),
        *(("restarted", why) for why in record.restarts),
        ("said", "" if _is_repeated(explanation.error, record.why) else explanation.error),
    ]
    if explanation.advice is not None:
        fields += [("cause", explanation.advice.cause), ("what to do", explanation.advice.todo)]
    title = f"Attempt {record.attempt} (job {record.job_id})"
    return "\n".join([title, *(_field(name, text) for name, text in fields if text)])


def _not_yet(record: AttemptRecord) -> str:
    return f"not yet: {record.signalled} asked it to" if record.signalled else "not yet: it is running"


def _explain(records: RunRecords, index: int, folder: Path | None, now: float) -> Explanation:
    record = records.attempts[index]
    kind = _kind(records, record, now)
    log = tail(folder / DRIVER_LOG, _READ_LINES, _READ_BYTES) if folder else ""
    error = reason_to_stop(log) if kind in _NO_ERROR else last_error(log)
    slurm_lines = "" if kind in _NO_ERROR else _slurm_lines(records, record.job_id)
    log_end = "\n".join(log.splitlines()[-_END_LINES:])
    texts = (slurm_lines, error, record.why, log_end)
    return Explanation(
        record=record,
        kind=kind,
        duration_s=_duration_s(records, record, now),
        num_steps=_num_steps(records, index),
        error=error or slurm_lines,
        advice=None if kind == "running" else advise(kind, *texts, has_jobs=record.source == "slurm"),
    )


def _kind(records: RunRecords, record: AttemptRecord, now: float) -> str:
    """Return how the attempt ended: its record cannot say that it was killed, nor by whom."""
    if records.is_running(record, now):
        return "running"
    sign = records.last_sign_of_life() if record is records.newest else None
    if record.exit_kind in ("running", "cancelled") and ended_by_time_limit(record, sign):
        return "walltime"
    if record.was_killed_in_teardown and _DUE_TO not in _slurm_lines(records, record.job_id):
        return "cancelled"
    if record.exit_kind != "running":
        return record.exit_kind
    return "node_lost" if record.lost_nodes else "killed"


def _duration_s(records: RunRecords, record: AttemptRecord, now: float) -> float | None:
    """Return how long the attempt lasted; one that was killed, up to its last sign of life, if that is still there."""
    end = record.ended_at
    if end is None and record is records.newest:
        end = now if records.is_running(record, now) else records.last_sign_of_life()
    return None if end is None else end - record.started_at


def _num_steps(records: RunRecords, index: int) -> int | None:
    """Return by how many steps the run was further on after this attempt; steps that were lost again do not count."""
    record = records.attempts[index]
    if index + 1 < len(records.attempts):
        return records.attempts[index + 1].first_step - record.first_step
    if records.state is None:
        return None
    return max(0, records.state.step - record.first_step) if records.state.attempt == record.attempt else 0


def _slurm_lines(records: RunRecords, job_id: str) -> str:
    """Return Slurm's own lines at the end of a job's output: the only trace of some kills."""
    path = job_output(records.run, records.chain, job_id)
    try:
        lines = tail(path, _READ_LINES, _READ_BYTES).splitlines() if path.is_file() else []
    except OSError:  # the user may have put it anywhere
        return ""
    return "\n".join(own_lines(lines, job_id))[-2000:]


def _is_repeated(error: str, why: str) -> bool:
    """Tell whether `why` quotes the error already."""
    return "\n" not in error and error.removeprefix("error: ").rstrip(".") in why


def _field(name: str, text: str) -> str:
    """Return a named field, wrapped; an error keeps its lines."""
    lines = [
        part for line in text.splitlines() for part in (textwrap.wrap(line, _WIDTH, break_long_words=False) or [""])
    ]
    first, *rest = lines if name != "said" else text.splitlines()
    return "\n".join([f"  {name:<11}{first}", *(f"{'':13}{line}" for line in rest)])
