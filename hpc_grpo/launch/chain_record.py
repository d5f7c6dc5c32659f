"""`chain.json`: the Slurm jobs of a run, as its own jobs and commands wrote them down.

Written by `hpc-grpo submit` and by each link when it starts; read by every command that must not ask the scheduler.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace

from hpc_grpo.run_dir import RunDir, write_json_atomic


@dataclass(frozen=True)
class Link:
    """A job of the run. `successor_of` is the job that queued it, empty for one the user handed in."""

    job_id: str
    submitted_at: float
    successor_of: str = ""


@dataclass(frozen=True)
class ChainRecord:
    """`links` in the order they were queued; `successor` waits for the running one, "" if none does.

    `ended` says why no further link is to come, "" while one may.
    """

    links: tuple[Link, ...] = ()
    successor: str = ""
    ended: str = ""

    def with_link(self, job_id: str, successor_of: str = "") -> ChainRecord:
        link = Link(job_id, time.time(), successor_of)
        return replace(self, links=(*self.links, link), successor=job_id if successor_of else "", ended="")


def read_chain(run: RunDir) -> ChainRecord:
    """The run's jobs; an empty record for a run that never was on Slurm."""
    try:
        values = json.loads(run.chain.read_text())
    except FileNotFoundError:
        return ChainRecord()
    links = tuple(Link(**link) for link in values.pop("links"))
    return ChainRecord(links=links, **values)


def write_chain(run: RunDir, record: ChainRecord) -> None:
    write_json_atomic(run.chain, asdict(record))
