"""`chain.json`: the jobs of a run.

`hpc-grpo submit` and `stop --now` write the file. Each job writes it when it queues another job, even before it takes
the run's lock. All commands read it, because they must not query the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from hpc_grpo.run.files import from_known, read_record, write_record
from hpc_grpo.run.paths import RunDir

if TYPE_CHECKING:
    from hpc_grpo.config import LaunchConfig

_OF_A_JOB = frozenset(["time_min", "partition", "account", "gpus_per_node", "cpus_per_node", "extra"])
"""The keys of `launch.slurm` that describe a job. Other keys, about the chain, always come from the current config."""


@dataclass(frozen=True)
class Link:
    """A job of the run. `successor_of` is the job before it in the chain, "" for the first.

    `first_step` is the step of the checkpoint that the job started from; None before its start. `output` is the job's
    output file; "" before its start, and if the queue did not name one.
    """

    job_id: str
    submitted_at: float
    successor_of: str = ""
    first_step: int | None = None
    output: str = ""


@dataclass(frozen=True)
class ChainRecord:
    """`links` are the jobs in the order they were queued. `successor` waits for the running job; "" for none.

    `ended` is the reason why no further job follows; "" while one may. `slurm` is the request of the next job, a
    `launch.slurm` section with `num_nodes`. It may differ from the config's if the user gave the queue other options.
    """

    links: tuple[Link, ...] = ()
    successor: str = ""
    ended: str = ""
    slurm: dict[str, Any] = field(default_factory=dict)

    def launch(self, configured: LaunchConfig) -> LaunchConfig:
        """Return `configured` with the request recorded for the next job."""
        if not self.slurm:
            return configured
        had = {key: value for key, value in self.slurm.items() if key in _OF_A_JOB}
        slurm = type(configured.slurm).model_validate({**configured.slurm.model_dump(), **had})
        num_nodes = self.slurm.get("num_nodes", configured.num_nodes)
        return configured.model_copy(update={"num_nodes": num_nodes, "slurm": slurm})

    def asking_for(self, launch: LaunchConfig) -> ChainRecord:
        """Return the record with `launch` as the request of the next job."""
        return replace(self, slurm={"num_nodes": launch.num_nodes, **launch.slurm.model_dump(mode="json")})

    def link(self, job_id: str) -> Link | None:
        return next((link for link in self.links if link.job_id == job_id), None)

    def with_link(
        self, job_id: str, successor_of: str = "", first_step: int | None = None, output: str = ""
    ) -> ChainRecord:
        """Return the record with the job added, or with its facts updated."""
        known = self.link(job_id)
        if known is None:
            return replace(self, links=(*self.links, Link(job_id, time.time(), successor_of, first_step, output)))
        updated = replace(known, successor_of=successor_of, first_step=first_step, output=output or known.output)
        return replace(self, links=tuple(updated if link is known else link for link in self.links))

    def without(self, job_ids: Collection[str]) -> ChainRecord:
        """Return the record without jobs that never began, which do not count as attempts."""
        links = tuple(link for link in self.links if link.job_id not in job_ids)
        return replace(self, links=links, successor="" if self.successor in job_ids else self.successor)

    def closed_by(self, job_id: str, why: str) -> ChainRecord:
        """Return the record with the reason `why` no job follows. Unchanged if the user has submitted another job."""
        behind = self.followers(job_id)
        others = [link.job_id for link in self.links if link.job_id not in behind]
        return replace(self, successor="", ended=why) if not others or others[-1] == job_id else self

    def successor_behind(self, job_id: str) -> str:
        """Return the recorded successor if it belongs to this job, else ""."""
        link = self.link(self.successor)
        return self.successor if link is not None and link.successor_of == job_id else ""

    def followers(self, job_id: str) -> tuple[str, ...]:
        """Return the jobs queued behind a job, in order: several if all were queued at once."""
        behind = next((link.job_id for link in reversed(self.links) if link.successor_of == job_id), "")
        return (behind, *self.followers(behind)) if behind else ()

    def replaced_by(self, job_id: str, successor_of: str) -> str:
        """Return the last started job behind `job_id`, or the job queued after `successor_of` in its place, else "".

        On a full disk, a job is missing in the record until the job that queued it ends.
        """
        begun = [link.job_id for link in self.links if link.first_step is not None]
        if behind := [follower for follower in self.followers(job_id) if follower in begun]:
            return behind[-1]
        is_known = not successor_of or self.link(job_id) is not None
        return "" if is_known else next(iter(self.followers(successor_of)), "")

    def since_the_user(self) -> tuple[Link, ...]:
        """Return the jobs since the user's last submission: limits count from there."""
        users_own = [index for index, link in enumerate(self.links) if not link.successor_of]
        return self.links[users_own[-1] :] if users_own else self.links

    def links_before(self, job_id: str, successor_of: str) -> tuple[Link, ...]:
        """Return the jobs queued before a job, back to the user's last submission; () for the submission itself.

        A submitted job may start before the record has it, behind an earlier chain.
        """
        return tuple(takewhile(lambda link: link.job_id != job_id, self.since_the_user())) if successor_of else ()


def stalled(first_steps: Sequence[int | None], newest: int) -> int:
    """Count the latest jobs in a row that ended without a newer checkpoint than they started from.

    None stands for a job that ended before it recorded its start.

    >>> stalled([0, 4, 4, None], newest=4)
    3
    """
    return len([*takewhile(lambda first: first is None or first >= newest, reversed(first_steps))])


def before_it_ran(run: RunDir, job_id: str) -> str:
    """Return a sentence on how far a job without an attempt got."""
    mark = run.job_mark(job_id)
    if not mark.exists():
        return "It ended before it had begun."
    node = mark.read_text().strip()
    return f"It began on {node} and ended before hpc-grpo ran in it: {run.slurm_log(job_id)} says why."


def read_chain(run: RunDir) -> ChainRecord:
    """Return the run's jobs; an empty record for a run that never was submitted."""

    def parse(values: dict[str, Any]) -> ChainRecord:
        return from_known(ChainRecord)({**values, "links": tuple(map(from_known(Link), values["links"]))})

    return read_record(run.chain, parse) or ChainRecord()


def write_chain(run: RunDir, record: ChainRecord) -> None:
    write_record(run.chain, asdict(record), keep_copy=True)
