"""Run directories in any state, written by the project's own writers."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_grpo.run.attempt import AttemptRecord, ExitKind
from hpc_grpo.run.chain import ChainRecord, write_chain
from hpc_grpo.run.files import write_atomic, write_json_atomic
from hpc_grpo.run.lock import LockOwner
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import Phase, RunState, write_state


class RunBuilder:
    """Ages and durations are in seconds before now."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path)
        self.run.create()
        write_atomic(self.run.config, "run: {}\n")
        write_json_atomic(self.run.source, {"created_at": time.time() - 7200})

    @classmethod
    def of(cls, run: RunDir) -> RunBuilder:
        """Return the builder of a run that exists."""
        builder = cls.__new__(cls)
        builder.run = run
        return builder

    def attempt(
        self, number: int, kind: ExitKind = "running", *, job_id: str = "", age_s: float = 600.0, **fields: Any
    ) -> AttemptRecord:
        """Attempt `number`, started `age_s` ago in job `number` + 10; one that has ended did so after 100 s."""
        started_at = time.time() - age_s
        values = {"ends_at": None, "why": f"why {number}", **fields}
        record = AttemptRecord(
            number,
            job_id or str(number + 10),
            "slurm",
            ["n1", "n2"],
            started_at=started_at,
            supervisor_pid=7,
            exit_kind=kind,
            **{"ended_at": None if kind == "running" else started_at + 100.0, **values},
        )
        self.folder(record).mkdir(parents=True, exist_ok=True)
        record.save(self.folder(record))
        return record

    def folder(self, record: AttemptRecord) -> Path:
        return self.run.attempt(record.attempt, record.job_id)

    def log(self, record: AttemptRecord, text: str) -> None:
        with (self.folder(record) / "driver.log").open("a") as file:
            file.write(text)

    def hold(self, attempt: int, beat_age_s: float = 2.0, **work: Any) -> None:
        holder = LockOwner("n1", 7, 1, str(attempt + 10), attempt, time.time() - beat_age_s, **work)
        write_json_atomic(self.run.holder, asdict(holder))

    def state(self, attempt: int, phase: Phase = "training", step: int = 40, **fields: Any) -> None:
        values: dict[str, Any] = {"reward": 0.5, "tokens_per_s": 2800.0, "eta_s": 4000.0, **fields}
        write_state(self.run, RunState(step, 95, attempt, phase, **values))

    def chain(self, *job_ids: str, **fields: Any) -> None:
        """Each job is the successor of the one before."""
        record = ChainRecord()
        for before, job_id in zip(("", *job_ids), job_ids, strict=False):
            record = record.with_link(job_id, before)
        write_chain(self.run, ChainRecord(record.links, fields.get("successor", ""), fields.get("ended", "")))
