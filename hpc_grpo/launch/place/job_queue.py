"""The interface between launching and a scheduler, and what job scripts of all queues share.

A `JobQueue` takes jobs and knows how they ended.
"""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hpc_grpo.errors import EXIT_CONFIG, ConfigError

if TYPE_CHECKING:
    from hpc_grpo.config import LaunchConfig
    from hpc_grpo.run.paths import RunDir


@dataclass(frozen=True)
class JobRequest:
    """A job that runs `hpc-grpo COMMAND` with what `launch` asks for; its output goes into `run`.

    `after` are jobs that must have ended, in any way. `is_held`: it waits until it is released. `keeps_shell`: traps of
    the set-up lines run at its end, but the queue's signals do not reach the command. `name` is unique, in the queue
    too. `may_be_queued`: an earlier try with that name failed, and the queue may have taken the job all the same.
    """

    run: RunDir
    launch: LaunchConfig
    command: str
    after: tuple[str, ...] = ()
    is_held: bool = False
    keeps_shell: bool = False
    name: str = field(default_factory=lambda: f"hpc-grpo:{secrets.token_hex(6)}")
    may_be_queued: bool = False


@dataclass(frozen=True)
class JobEnd:
    """The end of a job; `state` is the queue's word for it, "" where it knows no end.

    `by_user`: cancelled by the user of this process; an administrator's cancel is an interruption. `at_time_limit`:
    it used up its time. `lost_a_node`: its processes may still live on a node that the queue lost sight of.
    """

    state: str = ""
    by_user: bool = False
    at_time_limit: bool = False
    lost_a_node: bool = False


class Job(Protocol):
    """A job as its queue described it when it was asked."""

    @property
    def is_over(self) -> bool:
        """Return whether it neither waits nor runs."""

    @property
    def output(self) -> str:
        """Return the file that its output goes to; "" where the queue does not say."""

    @property
    def node_hours(self) -> float | None:
        """Return the node-hours that it takes if it goes on to its time limit; None where the queue does not say."""

    def asked(self, launch: LaunchConfig, *, by_hand: bool) -> LaunchConfig:
        """Return what a successor asks for: `launch`, kept off the nodes that this job is kept off.

        `by_hand`: the user handed the job to the queue without us; what they gave it wins over `launch`. The job's own
        resources do not count: the queue rounds and renames them. Raises LaunchError.
        """

    def exclude_nodes(self, nodes: Sequence[str]) -> None:
        """Keep the pending job off further nodes. Raises LaunchError where too few would be left for it."""


class JobQueue(Protocol):
    """A scheduler's queue. All but `end_of` and `preempted_until` raise LaunchError when it does not answer.

    Each method asks the scheduler once or twice, `Job.exclude_nodes` a few times; `render` never.
    """

    def in_a_hurry(self) -> JobQueue:
        """Return this queue for a caller that can wait ten seconds for an answer, but not a minute."""

    def with_own_settings(self, launch: LaunchConfig, environ: Mapping[str, str]) -> LaunchConfig:
        """Return `launch` with what the user's own variables for this queue ask for where it says nothing itself."""

    def render(self, request: JobRequest) -> str:
        """Return the job script. Raises ConfigError for options that cannot be asked for."""

    def submit(self, request: JobRequest) -> str:
        """Queue the job and return its id. Raises LaunchError in the scheduler's words, ConfigError as `render`."""

    def start_estimate(self, request: JobRequest, deadline_s: float = 60.0) -> str:
        """Return when the job would start, in the scheduler's words; queues nothing."""

    def show(self, job_id: str) -> Job | None:
        """Return the job; None once the queue has forgotten it."""

    def end_of(self, job_id: str) -> JobEnd:
        """Return how the job ended; with state "" where it has not, or the scheduler does not answer."""

    def preempted_until(self, job_id: str) -> float | None:
        """Return when (unix seconds) the queue takes a running job's nodes for another job; None: it does not.

        Waits two seconds at most: SIGKILL may be near. None too where the scheduler does not answer in that time.
        """

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End jobs, waiting or running; one that is over is no error."""

    def release(self, job_id: str) -> None:
        """Let a job go that was submitted held."""


def job_python(launch: LaunchConfig) -> str:
    """Return the Python of jobs: `launch.python`, else this one. Raises ConfigError if Ray is neither here nor in one.

    In a container training has the image's.
    """
    if launch.python is not None:
        return launch.python
    if launch.container is None and find_spec("ray") is None:
        raise ConfigError(
            f"This Python has no Ray, and jobs would run it: {sys.executable}. Set launch.python to that of an "
            f"installation with Ray (pip install -e '.[gpu]') on a file system that the nodes see."
        )
    return sys.executable


def setup_lines(launch: LaunchConfig) -> list[str]:
    """Return the shell lines before the command: modules and what the site wants. A failing module ends the shell.

    Without CUDA or the network of its modules, training would fail much later, or be ten times slower.
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
    """Return the shell line that finds the programs beside `python` (hpc-grpo, ninja, ray) first; None: this one."""
    # After modules and profiles, which change PATH too.
    return f"export PATH={shlex.quote(str(Path(python or sys.executable).parent))}:$PATH"
