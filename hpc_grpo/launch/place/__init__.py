"""Places: the nodes of a run, how an agent starts there, when time ends, whether a job lives.

`base` holds the interfaces. A kind of place is a class with @place_kind, in MODULE.py or FOLDER/place.py here.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Mapping, Sequence

from hpc_grpo.launch.place.base import KINDS, Place, PlaceKind
from hpc_grpo.launch.place.job_queue import JobQueue
from hpc_grpo.launch.place.local import LocalPlace
from hpc_grpo.launch.place.slurm.jobs import SlurmQueue


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """Return the place of this process: the kind that the environment shows, else this machine. Makes no queries."""
    here = next((kind for kind in place_kinds() if kind.is_here(environ)), LocalPlace)
    return here(environ)


def job_queue() -> JobQueue:
    """Return the queue for runs submitted on this machine."""
    return SlurmQueue()


def queue_of(source: str) -> JobQueue | None:
    """Return the queue of an attempt that was a job, by the `source` in its attempt.json; None if it was no job."""
    return next((kind({}).queue for kind in place_kinds() if kind.name == source), None)


def place_kinds() -> Sequence[PlaceKind]:
    """Import all modules of this folder and return the kinds of place. LocalPlace is the default, and no kind."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(f"{module.name}.place" if module.ispkg else module.name)
    return KINDS
