"""The interface between launching and a scheduler, and what job scripts of all queues share."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import EXIT_CONFIG, ConfigError
from hpc_grpo.run.paths import RunDir

TASK = "$HPC_GRPO_TASK_OF_ARRAY"
"""Stands for the number of a task in the path of an array's run."""


@dataclass(frozen=True)
class JobRequest:
    """A job that runs `hpc-grpo COMMAND` with the resources of `launch`. Its output goes into the run directory.

    With `tasks`, it is an array: one job for each number, which replaces TASK in `run` and `command`. `at_once` is the
    largest number of tasks that run at the same time; None for no limit.

    `after`: jobs to wait for, however they end. `is_held`: the job waits for a release. `keeps_shell`: traps of the
    setup lines run at the job's end, but the queue's signals do not reach the command. `name` is unique, even in the
    queue. `may_be_queued`: an earlier try with this name failed, but the queue may have taken the job.
    """

    run: RunDir
    launch: LaunchConfig
    command: str
    after: tuple[str, ...] = ()
    is_held: bool = False
    keeps_shell: bool = False
    name: str = field(default_factory=lambda: f"hpc-grpo:{secrets.token_hex(6)}")
    may_be_queued: bool = False
    tasks: tuple[int, ...] = ()
    at_once: int | None = None


def job_of_task(array_id: str, number: int) -> str:
    """Return the job id of a task of an array."""
    return f"{array_id}_{number}"


@dataclass(frozen=True)
class JobEnd:
    """The end of a job. `state` is the queue's word for it, "" for no known end.

    `by_user`: this process's user cancelled it; a cancel by an administrator is an interruption. `at_time_limit`: it
    used up its time. `lost_a_node`: its processes may still live on a lost node.
    """

    state: str = ""
    by_user: bool = False
    at_time_limit: bool = False
    lost_a_node: bool = False


class Job(Protocol):
    """A job as its queue described it at the query."""

    @property
    def is_over(self) -> bool:
        """Return whether it neither waits nor runs."""

    @property
    def output(self) -> str:
        """Return the job's output file; "" if the queue does not report it."""

    @property
    def node_hours(self) -> float | None:
        """Return the node-hours of the job up to its time limit; None if the queue does not report them."""

    def asked(self, launch: LaunchConfig, *, by_hand: bool) -> LaunchConfig:
        """Return `launch` for a successor, with this job's excluded nodes added.

        `by_hand`: the user submitted the job without hpc-grpo, and the user's options override `launch`. If the queue
        keeps the options, the resources that it reports are ignored: it rounds and renames them. Raises LaunchError.
        """

    def exclude_nodes(self, nodes: Sequence[str]) -> None:
        """Keep the pending job off further nodes. Raises LaunchError if too few would be left for it."""


class JobQueue(Protocol):
    """A scheduler's queue. All methods except `end_of` and `preempted_until` raise LaunchError if it does not answer.

    Most methods make one or two queries, `submit` up to three, `end_of` and `Job.exclude_nodes` a few, `render` none.
    """

    def in_a_hurry(self) -> JobQueue:
        """Return this queue with a limit of ten seconds for an answer, instead of a minute."""

    def with_own_settings(self, launch: LaunchConfig, environ: Mapping[str, str]) -> LaunchConfig:
        """Return `launch`, with unset values filled from the user's variables for this queue."""

    def render(self, request: JobRequest) -> str:
        """Return the job script. Raises ConfigError for options that may not be requested."""

    def submit(self, request: JobRequest) -> str:
        """Queue the job and return its id. Raises LaunchError in the scheduler's words, ConfigError like `render`.

        Raises JobInDoubtError if the queue may have taken the job.
        """

    def start_estimate(self, request: JobRequest, deadline_s: float = 60.0) -> str:
        """Return when the job would start, in the scheduler's words. Queues nothing."""

    def show(self, job_id: str) -> Job | None:
        """Return the job; None if the queue has forgotten it."""

    def end_of(self, job_id: str) -> JobEnd:
        """Return how the job ended; with state "" if it has not ended, or the scheduler does not answer."""

    def preempted_until(self, job_id: str) -> float | None:
        """Return when (unix seconds) the queue takes a running job's nodes for another job. None: it does not.

        Waits two seconds at most, since SIGKILL may be near. Also None if the scheduler does not answer in that time.
        """

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End jobs, waiting or running. A job that has ended is no error."""

    def release(self, job_id: str) -> None:
        """Release a held job."""


def job_python(launch: LaunchConfig) -> str:
    """Return the Python of jobs: `launch.python`, else this Python. Raises ConfigError if this Python lacks Ray."""
    if launch.python is not None:
        return launch.python
    if launch.container is None and find_spec("ray") is None:  # in a container, training uses the image's Python
        raise ConfigError(
            f"This Python has no Ray, and jobs would run it: {sys.executable}. Set launch.python to the Python of an "
            f"installation with Ray (pip install -e '.[gpu]') on a file system that the nodes see."
        )
    return sys.executable


def setup_lines(launch: LaunchConfig) -> list[str]:
    """Return the shell lines before the command: modules and the site's setup. A failing module ends the shell.

    Without the CUDA or the network of its modules, training would fail much later, or be ten times slower.
    """

    def load(module: str) -> str:
        told = (
            f"error: launch.modules: '{module}' could not be loaded on $(hostname). "
            f"Name a module that 'module avail' lists there, or take it out."
        )
        return f'module load {shlex.quote(module)} || {{ echo "{told}" >&2; exit {EXIT_CONFIG}; }}'

    modules = ["module reset", *map(load, launch.modules)] if launch.modules else []
    return [*modules, *launch.setup_lines]


def path_line(python: str | None) -> str:
    """Return the shell line that puts programs beside `python` (hpc-grpo, ray) first on PATH. None: this Python."""
    # After modules and profiles, which change PATH too.
    return f"export PATH={shlex.quote(str(Path(python or sys.executable).parent))}:$PATH"
