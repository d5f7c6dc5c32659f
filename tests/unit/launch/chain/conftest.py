"""What the tests of a chain's links begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.launch.chain import link as chain
from hpc_grpo.run.paths import RunDir
from tests.unit.launch.chain.chain_scene import FakeSlurm


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(jobs={"7": {"JobState": "RUNNING", "NumNodes": "2", "Partition": "workq"}})
    monkeypatch.setattr(chain.slurm, "submit", fake.submit)
    monkeypatch.setattr(chain, "final_state", lambda job_id: fake.final.get(job_id, ""))
    monkeypatch.setattr(chain, "notify", lambda command, run, news: fake.notified.append((news.event, news.why)))
    for name in ("show_job", "cancel_jobs", "exclude_nodes"):
        monkeypatch.setattr(chain, name, getattr(fake, name))
    return fake


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)
