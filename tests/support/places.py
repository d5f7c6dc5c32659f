"""A place and a job queue that only remember what they were asked: behind the interfaces of launch/place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.place.base import Allocation, NodeResources, Place
from hpc_grpo.launch.place.job_queue import JobEnd, JobQueue, JobRequest


def allocation(*nodes: str, job_id: str = "17", ends_at: float | None = None) -> Allocation:
    """Nodes, of which this process is on the first."""
    return Allocation(job_id, nodes, nodes[0], ends_at)


@dataclass
class FakeJob:
    """A job; the user gave what `given` makes of the config's launch section, where it was handed in by hand."""

    job_id: str
    is_over: bool = False
    output: str = ""
    node_hours: float | None = None
    given: Callable[[LaunchConfig], LaunchConfig] = lambda launch: launch
    excluded: list[str] = field(default_factory=list)

    def asked(self, launch: LaunchConfig, *, by_hand: bool) -> LaunchConfig:
        return self.given(launch) if by_hand else launch

    def exclude_nodes(self, nodes: Sequence[str]) -> None:
        self.excluded += nodes


@dataclass
class FakeQueue:
    """Jobs by id, numbered from 100; `asked` holds in order what was asked of it, as "submit 100 after 7".

    While `is_silent` it answers nothing. It refuses the job number `refused`, counted from 1.
    """

    jobs: dict[str, FakeJob] = field(default_factory=dict)
    ends: dict[str, JobEnd] = field(default_factory=dict)
    preempted: dict[str, float] = field(default_factory=dict)
    requests: list[JobRequest] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    is_silent: bool = False
    refused: int = 0
    hurried: int = 0

    def in_a_hurry(self) -> FakeQueue:
        self.hurried += 1
        return self

    def with_own_settings(self, launch: LaunchConfig, environ: Mapping[str, str]) -> LaunchConfig:
        return launch

    def render(self, request: JobRequest) -> str:
        return f"hpc-grpo {request.command}\n"

    def submit(self, request: JobRequest) -> str:
        self._answer()
        if len(self.requests) + 1 == self.refused:
            raise LaunchError("The queue refused the job: too many jobs.")
        job_id = str(100 + len(self.requests))
        self.requests.append(request)
        after = f" after {' '.join(request.after)}" if request.after else ""
        held = " held" if request.is_held else ""
        self.asked.append(f"submit {job_id}{after}{held}")
        self.jobs[job_id] = FakeJob(job_id)
        return job_id

    def start_estimate(self, request: JobRequest, deadline_s: float = 60.0) -> str:
        self._answer()
        return "Job 100 would start at once.\n"

    def show(self, job_id: str) -> FakeJob | None:
        self._answer()
        return self.jobs.get(job_id)

    def end_of(self, job_id: str) -> JobEnd:
        return self.ends.get(job_id, JobEnd())

    def preempted_until(self, job_id: str) -> float | None:
        return self.preempted.get(job_id)

    def cancel(self, job_ids: Sequence[str]) -> None:
        self._answer()
        self.asked.append(f"cancel {' '.join(job_ids)}")
        self.cancelled += job_ids

    def release(self, job_id: str) -> None:
        self._answer()
        self.asked.append(f"release {job_id}")

    def _answer(self) -> None:
        if self.is_silent:
            raise LaunchError("The queue does not answer.")


@dataclass
class FakePlace(Place):
    """Starts processes of this machine as if they were on its nodes. The first `silent` questions fail."""

    nodes: Allocation = field(default_factory=lambda: allocation("nid001"))
    name: str = "slurm"
    disks: Literal["shared", "private"] = "shared"
    queue: JobQueue | None = field(default_factory=FakeQueue)
    is_attended: bool = False
    silent: int = 0
    wrap: Callable[[str, Sequence[str]], list[str]] = lambda node, command: list(command)

    @property
    def job_id(self) -> str:  # type: ignore[override]
        return self.nodes.job_id

    def allocation(self) -> Allocation:
        self.silent -= 1
        if self.silent >= 0:
            raise LaunchError("The place does not answer.")
        return self.nodes

    def node_resources(self) -> NodeResources:
        return NodeResources(4, 0)

    def start_command(self, node: str, command: Sequence[str]) -> list[str]:
        assert node in self.nodes.nodes
        return self.wrap(node, command)

    def start_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        return dict(environ)

    def is_node_failure(self, said: str) -> bool:
        return "node failure" in said.lower()
