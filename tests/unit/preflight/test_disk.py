"""What is said of the room below run.root before a job is queued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import load_config
from hpc_grpo.errors import ConfigError
from hpc_grpo.plan.disk import disk_budget
from hpc_grpo.preflight import inputs
from hpc_grpo.preflight.findings import Context
from hpc_grpo.preflight.inputs import disk_finding, input_findings, judged_disk
from hpc_grpo.system.disk import Room
from hpc_grpo.types import GIB
from tests.unit.plan.plan_configs import plan_shipped_7b


@pytest.mark.parametrize(
    ("room_gib", "status", "says"),
    [(100, "failure", "the run keeps checkpoints 255 GiB"), (298, "warning", "if completions"), (900, "ok", "up to 3")],
)
def test_sure_parts_must_fit_and_estimated_ones_should(room_gib: int, status: str, says: str, scratch: Path) -> None:
    budget = disk_budget(plan_shipped_7b("7B", 2), Room(room_gib * GIB, "left of the project quota"))
    finding = judged_disk(budget)
    assert (finding.status, says in finding.says) == (status, True), finding
    assert f"{room_gib:,} GiB" in finding.says
    assert f"left of the project quota in {scratch}/hpc-grpo" in finding.says


@pytest.mark.parametrize(("num_files", "status"), [(100, "warning"), (10**6, "ok"), (None, "ok")])
def test_a_quota_of_files_that_the_run_will_pass_is_a_warning(num_files: int | None, status: str) -> None:
    room = Room(900 * GIB, "free", num_files, "left of the user quota")
    finding = judged_disk(disk_budget(plan_shipped_7b("7B", 2), room))
    assert finding.status == status
    if status == "warning":
        assert "and 100 files are left of the user quota" in finding.says


def test_a_model_that_is_not_here_is_not_judged() -> None:
    config = load_config("local/debug", ["model.path=org/nowhere"])
    assert disk_finding(config, Context(config, config.launch, {})).status == "skipped"
    assert {found.status for found in input_findings(Context(None, config.launch, {})).values()} == {"skipped"}


def test_a_file_system_that_does_not_say_what_is_free_fails_the_check_and_the_submission(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(_plans: Any) -> Any:
        raise ConfigError("The file system of /x does not report free space (Input/output error).")

    monkeypatch.setattr(inputs, "plan_of", lambda *_: None)
    monkeypatch.setattr(inputs, "read_disk", silent)
    config = load_config("local/debug", ["model.path=org/m"])
    finding = disk_finding(config, Context(config, config.launch, {}))
    assert (finding.status, "does not report free space" in finding.says) == ("failure", True)
    with pytest.raises(ConfigError, match="does not report free space"):
        inputs.refuse_full_disk([config], {})
