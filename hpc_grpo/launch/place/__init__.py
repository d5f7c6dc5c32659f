"""Places: which nodes a run has, how an agent starts there, when time ends, whether a job lives.

`base` holds the interfaces; each module or folder beside it with a place is one that there is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpc_grpo.launch.place.base import JobQueue, Place
from hpc_grpo.launch.place.local import LocalPlace
from hpc_grpo.launch.place.slurm.jobs import SlurmQueue
from hpc_grpo.launch.place.slurm.place import JOB_ID_VARIABLE, SlurmPlace


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """Return the place of this process: the Slurm job it is in, else this machine. Asks nobody yet."""
    return SlurmPlace(environ) if JOB_ID_VARIABLE in environ else LocalPlace(environ)


def job_queue() -> JobQueue:
    """Return the queue that runs are submitted to from here."""
    return SlurmQueue()


def queue_of(source: str) -> JobQueue | None:
    """Return the queue that an attempt was a job of, by the `source` in its attempt.json; None: of no queue."""
    return SlurmQueue() if source == SlurmPlace.name else None
