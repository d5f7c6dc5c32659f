"""`attempt.json`: an attempt and how it ended, described for the user."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from hpc_grpo.run.files import from_known, read_record, write_record
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.say import not_worth_the_run

ExitKind = Literal[
    "running", "complete", "resumable", "stopped", "config", "crash", "cancelled", "bringup_failed", "node_lost"
]
"""A finished attempt with `running` in its record was killed before it could write its end."""

NEAR_THE_LIMIT_S = 300.0
"""An attempt that ended this close to its allocation's end was ended by the time limit."""


@dataclass
class AttemptRecord:
    """The content of attempt.json. Times are unix seconds; `phases_s` are durations by phase; `ray` includes `head`.

    `first_step` is the step of the checkpoint that the attempt started from. `ray_dashboard` is an address on the
    head's loopback, "" without a dashboard. `restarts` has a reason for each restart of the driver within the attempt.
    `stuck` is the reason why the driver was ended, `late` the reasons for other processes. `signalled` is the first
    stop signal, "" for none. For a killed attempt, `ended_at` is its last sign of life, if a later job saw one.
    """

    attempt: int
    job_id: str
    source: str
    nodes: list[str]
    started_at: float
    ends_at: float | None
    supervisor_pid: int
    first_step: int = 0
    ray_address: str = ""
    ray_dashboard: str = ""
    num_gpus: int = 0
    ended_at: float | None = None
    exit_kind: ExitKind = "running"
    exit_code: int | None = None
    why: str = ""
    stuck: str = ""
    signalled: str = ""
    signalled_at: float | None = None
    lost_nodes: dict[str, str] = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    restarts: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)

    @property
    def was_killed_in_teardown(self) -> bool:
        """Return whether an attempt that no longer runs was cancelled, and killed by SIGKILL before it wrote its end.

        False for an attempt that lost a node: the queue ends the rest of its job.
        """
        return self.exit_kind == "running" and self.signalled != "" and not self.lost_nodes

    def save(self, attempt_dir: Path) -> None:
        with not_worth_the_run("attempt.json could not be written"):
            write_record(attempt_dir / "attempt.json", asdict(self), keep_copy=True)

    def end(self, kind: ExitKind, exit_code: int, why: str) -> None:
        self.exit_kind, self.exit_code, self.why = kind, exit_code, why
        self.ended_at = time.time()


def read_attempts(run: RunDir) -> list[AttemptRecord]:
    """Return a run's attempts in order. Skips records that cannot be read, for example after a full disk."""
    records = []
    for folder in run.attempt_dirs().values():
        with contextlib.suppress(OSError):
            if (record := read_record(folder / "attempt.json", from_known(AttemptRecord))) is not None:
                records.append(record)
    return sorted(records, key=lambda record: record.attempt)
