"""`chain.json`: the Slurm jobs of a run, as its own jobs and commands wrote them down.

Written by `hpc-grpo submit`, `resume` and `cancel`, and by a link that holds the run; read by every command, which must
not ask the scheduler.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.run.paths import RunDir

if TYPE_CHECKING:
    from hpc_grpo.config import LaunchConfig

_OF_A_JOB = ("time_min", "partition", "account", "gpus_per_node", "cpus_per_node", "extra")
"""Of `launch.slurm` what a job has; the rest says how its chain goes on, as the config has it now."""


@dataclass(frozen=True)
class Link:
    """A job of the run. `successor_of` is the job that queued it, empty for one the user handed in.

    `first_step` is the step of the checkpoint it started from; None until it has started. `output` is the file that
    Slurm writes its output to, once it has started and "" where Slurm did not say.
    """

    job_id: str
    submitted_at: float
    successor_of: str = ""
    first_step: int | None = None
    output: str = ""


@dataclass(frozen=True)
class ChainRecord:
    """`links` in the order they were queued; `successor` waits for the running one, "" if none does.

    `ended` says why no further link is to come, "" while one may. `slurm` holds what the last link really had, as a
    `launch.slurm` section: a job may have been handed in with other options than the config's.
    """

    links: tuple[Link, ...] = ()
    successor: str = ""
    ended: str = ""
    slurm: dict[str, Any] = field(default_factory=dict)

    def launch(self, configured: LaunchConfig) -> LaunchConfig:
        """`configured`, asking Slurm for what the last link had."""
        if not self.slurm:
            return configured
        had = {key: value for key, value in self.slurm.items() if key in _OF_A_JOB}
        slurm = type(configured.slurm).model_validate({**configured.slurm.model_dump(), **had})
        num_nodes = self.slurm.get("num_nodes", configured.num_nodes)
        return configured.model_copy(update={"num_nodes": num_nodes, "slurm": slurm})

    def link(self, job_id: str) -> Link | None:
        return next((link for link in self.links if link.job_id == job_id), None)

    def with_link(
        self, job_id: str, successor_of: str = "", first_step: int | None = None, output: str = ""
    ) -> ChainRecord:
        """With a job entered, or what is known of it brought up to date."""
        known = self.link(job_id)
        if known is None:
            return replace(self, links=(*self.links, Link(job_id, time.time(), successor_of, first_step, output)))
        updated = replace(known, successor_of=successor_of, first_step=first_step, output=output or known.output)
        return replace(self, links=tuple(updated if link is known else link for link in self.links))

    def followers(self, job_id: str) -> tuple[str, ...]:
        """The jobs queued behind one: its successor, that one's, and so on; several where all were queued at once."""
        behind = next((link.job_id for link in reversed(self.links) if link.successor_of == job_id), "")
        return (behind, *self.followers(behind)) if behind else ()

    def since_the_user(self) -> tuple[Link, ...]:
        """The links from the last one on that the user handed in: limits count from there."""
        handed_in = [index for index, link in enumerate(self.links) if not link.successor_of]
        return self.links[handed_in[-1] :] if handed_in else self.links


def asked_for(launch: LaunchConfig) -> dict[str, Any]:
    """Return what a job of `launch` asks for, as `ChainRecord.slurm` keeps it."""
    return {"num_nodes": launch.num_nodes, **launch.slurm.model_dump(mode="json")}


def stalled(first_steps: Sequence[int | None], newest: int) -> int:
    """How many of the latest links ended without a newer checkpoint than they started from.

    A None is a link that ended before it could say where it started.

    >>> stalled([0, 4, 4, None], newest=4)
    3
    """
    count = 0
    for first in reversed(first_steps):
        if first is not None and newest > first:
            break
        count += 1
    return count


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
