"""A job queue for the commands that submit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.launch.place.job_queue import JobRequest
from hpc_grpo.launch.place.slurm.jobs import SlurmQueue
from tests.support.places import FakeQueue
from tests.support.slurm_programs import SlurmPrograms


@pytest.fixture(autouse=True)
def _stays_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_grpo.cli.train.become_copy", lambda _run, _words: None)


@pytest.fixture(autouse=True)
def _plans_are_quick(quick_plans: None) -> None: ...


@pytest.fixture
def programs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> SlurmPrograms:
    """Return Slurm's programs; scontrol answers nothing about partitions."""
    programs = SlurmPrograms(tmp_path_factory.mktemp("slurm"))
    programs.answer("scontrol", "", code=1)
    monkeypatch.setenv("PATH", f"{programs.folder}:{os.environ['PATH']}")
    return programs


@dataclass
class RenderingQueue(FakeQueue):
    """Render as Slurm's queue does, which refuses options that cannot be asked for, and knows sbatch's variables."""

    def with_own_settings(self, launch: LaunchConfig, environ: Mapping[str, str]) -> LaunchConfig:
        return SlurmQueue().with_own_settings(launch, environ)

    def render(self, request: JobRequest) -> str:
        return SlurmQueue().render(request)


@pytest.fixture
def queue(programs: SlurmPrograms, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeQueue:
    """Return the queue that commands submit to, called in an empty working directory."""
    queue = RenderingQueue()
    monkeypatch.setattr("hpc_grpo.cli.submit.job_queue", lambda: queue)
    monkeypatch.chdir(tmp_path)
    return queue
