"""A run and a queue that the tests of a chain begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.run.paths import RunDir
from tests.support.places import FakeJob, FakeQueue


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that was started in the folder it lies in."""
    run = RunDir(tmp_path / "run")
    run.create()
    write_json_atomic(run.source, {"working_dir": str(tmp_path)})
    return run


@pytest.fixture
def queue() -> FakeQueue:
    """The queue while job 7 runs; the jobs that it takes are numbered from 100."""
    return FakeQueue(jobs={"7": FakeJob("7")})
