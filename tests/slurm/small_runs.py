"""Tiny runs on two nodes, handed in to the virtual cluster and looked at from outside."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_grpo.run.attempt import AttemptRecord, read_attempts
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_state
from tests.integration.training_runs import LETTERS, tiny_config

if TYPE_CHECKING:
    from tests.slurm.conftest import JobEnd, SlurmCluster

_DEADLINE_S = 420.0
_NODE_STATE = Path(__file__).with_name("node_state.py")


def two_node_config(workspace: Path, name: str, num_steps: int, **sections: Any) -> Path:
    """Half of two nodes in one job of ten minutes: a learner and an engine on each; a step takes a second or so."""
    slurm = {"gpus_per_node": 2, "cpus_per_node": 4, "time_min": 10, "max_job_chains": 0}
    launch = {"object_store_gib": 0.1, "num_nodes": 2, "slurm": slurm, **sections.pop("launch", {})}
    return tiny_config(
        workspace,
        name,
        train={"total_steps": num_steps, "lr": 1e-3, "zero_stage": 2},
        rewards=[{"name": LETTERS, "args": {"delay_s": 0.2}}],
        checkpoint={"every": None},
        launch=launch,
        **sections,
    )


@dataclass
class SmallRun:
    """A job of the run in `run`; use as a context, which cancels it."""

    cluster: SlurmCluster
    run: RunDir
    job_id: int

    def __enter__(self) -> SmallRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.run(["scancel", "--quiet", str(self.job_id)])

    @property
    def step(self) -> int:
        state = read_state(self.run)
        return state.step if state is not None and state.phase == "training" else 0

    def wait_for_step(self, step: int) -> None:
        """Wait for a step of training. Fail at once, with the reason, if the first attempt ends before."""

        def is_there() -> bool:
            assert self.step >= step or not (ended := ended_attempts(self.run)), ended[0].why
            return self.step >= step

        self.cluster.wait_until(is_there, _DEADLINE_S, f"{self.run.path.name} has done step {step}")

    def wait(self) -> JobEnd:
        return self.cluster.wait_for_job(self.job_id, _DEADLINE_S)

    def node_states(self, needles: Sequence[str] = ()) -> dict[str, Node]:
        """What the job has on each node; `needles` are words that are looked for in its files and arguments."""
        lines = "".join(f"{needle}\n" for needle in needles)
        command = f"{shlex.join([sys.executable, str(_NODE_STATE), str(self.job_id)])} <<< {shlex.quote(lines)}"
        # Through a file: the needles must not be arguments of the search itself.
        script = self.run.path.parent / "look.sh"
        script.write_text(command)
        try:
            answers = {name: self.cluster.output(["bash", str(script)], on=name) for name in self.cluster.node_names}
        finally:
            script.unlink()
        return {name: Node(**json.loads(answer)) for name, answer in answers.items()}


@dataclass(frozen=True)
class Node:
    """See node_state.py."""

    processes: list[str]
    listening: list[dict[str, Any]]
    folders: list[str]
    shared_memory: list[str]
    needles: list[str] = field(default_factory=list)


def ended_attempts(run: RunDir) -> list[AttemptRecord]:
    return [attempt for attempt in read_attempts(run) if attempt.ended_at is not None]


def run_of(workspace: Path, name: str) -> RunDir:
    return RunDir(workspace / "runs" / name)
