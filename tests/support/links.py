"""Links of a chain, attempts that ended, and what the user heard: what the tests of a chain are made of."""

from __future__ import annotations

import time
from typing import Any

from hpc_grpo.config import LaunchConfig
from hpc_grpo.launch.chain.link import ChainLink, LinkJob
from hpc_grpo.launch.place.job_queue import JobEnd
from hpc_grpo.run.attempt import AttemptRecord, ExitKind
from hpc_grpo.run.paths import RunDir
from tests.support.configs import minimal_config
from tests.support.places import FakeQueue

CANCELLED = JobEnd("CANCELLED by 7", by_user=True)
TELL = ["sh", "-c", 'echo "$HPC_GRPO_EVENT: $HPC_GRPO_WHY" >> "$HPC_GRPO_RUN/told"']


def launch(**slurm: Any) -> LaunchConfig:
    slurm = {"max_job_chains": None, **slurm}
    return minimal_config(launch={"notify": TELL, "slurm": slurm, "max_stalled_attempts": 3}).launch


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def link(run: RunDir, queue: FakeQueue, job_id: str = "7", successor_of: str = "", **slurm: Any) -> ChainLink:
    job = LinkJob(successor_of, slurm.pop("by_hand", False), job_id, "hpc_grpo.driver.main")
    return ChainLink(run, launch(**slurm), queue, job)


def started(run: RunDir, queue: FakeQueue, job_id: str = "7", successor_of: str = "", **slurm: Any) -> ChainLink:
    own = link(run, queue, job_id, successor_of, **slurm)
    own.have_two_wait()
    own.start()
    return own


def ended(kind: ExitKind, lost: dict[str, str] | None = None, signalled: str = "") -> AttemptRecord:
    record = AttemptRecord(1, "7", "slurm", ["nid001"], time.time(), None, 1)
    record.end(kind, 1, f"It ended as {kind}.")
    record.lost_nodes, record.signalled = lost or {}, signalled
    return record


def saved(run: RunDir, attempt: AttemptRecord) -> AttemptRecord:
    folder = run.attempt(attempt.attempt, attempt.job_id)
    folder.mkdir(parents=True)
    attempt.save(folder)
    return attempt


def two_nodes_by_hand(launch: LaunchConfig) -> LaunchConfig:
    slurm = launch.slurm.model_copy(update={"partition": "workq"})
    return launch.model_copy(update={"num_nodes": 2, "slurm": slurm})


def told(run: RunDir) -> list[str]:
    path = run.path / "told"
    return path.read_text().splitlines() if path.exists() else []
