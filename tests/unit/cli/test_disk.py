"""`hpc-grpo disk du` and `hpc-grpo disk clean`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_grpo.errors import EXIT_CONFIG, EXIT_HELD
from hpc_grpo.run.checkpoint import newest_step
from hpc_grpo.system.disk import Room
from tests.support.command import call
from tests.support.run_builder import RunBuilder
from tests.unit.run.test_retention import export, save


@pytest.fixture
def trained(built: RunBuilder) -> RunBuilder:
    """A run with two checkpoints, two exports and all its records."""
    save(built.run, 2, 4)
    export(built.run, 2, 4)
    built.attempt(1, "complete")
    for path in (built.run.metrics, built.run.ledger):
        path.write_text("{}\n")
    return built


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_du_says_what_takes_how_much_and_what_clean_would_free(trained: RunBuilder) -> None:
    output = call("disk", "du", "adder").output
    assert "checkpoints" in output
    assert "steps 2, 4" in output
    assert "clean would free" in output
    *runs, _room_left = output.splitlines()  # which others use meanwhile
    assert call("disk", "du").output.splitlines()[:-1] == runs
    [run] = json.loads(call("disk", "du", "--json").output)
    assert run["run"] == str(trained.run.path)
    assert run["removable"] > 0
    assert sum(part["num_files"] for part in run["parts"]) == 1 + len(list(trained.run.path.rglob("*")))
    assert {part["name"] for part in run["parts"]} == {"checkpoints", "exports", "logs of attempts", "records"}


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (
            Room(3 * 2**30, "free", 1234, "left of the user quota"),
            "3.0 GiB free, 1,234 files left of the user quota in",
        ),
        (Room(3 * 2**30, "free"), "3.0 GiB free in"),
    ],
)
def test_du_ends_with_the_room_that_is_left_in_bytes_and_files(
    trained: RunBuilder, monkeypatch: pytest.MonkeyPatch, room: Room, said: str
) -> None:
    monkeypatch.setattr("hpc_grpo.cli.disk.room_in", lambda _folder: room)
    assert call("disk", "du", "adder").output.splitlines()[-1] == f"{said} {trained.run.path.parent}"


def test_du_without_runs_says_where_it_looked(root: Path) -> None:
    assert f"No runs below {root}" in call("disk", "du").stderr


def test_clean_lists_and_removes_nothing_without_a_word(trained: RunBuilder) -> None:
    before = files(trained.run.path)
    result = call("disk", "clean", "adder")
    assert result.exit_code == 0
    assert f"{trained.run.checkpoint(2)}  (older than checkpoint 4)" in result.output
    assert f"{trained.run.export(2)}  (older than export 4)" in result.output
    assert "Nothing was removed. --yes removes these" in result.output
    assert files(trained.run.path) == before


def test_clean_keeps_the_newest_checkpoint_the_newest_export_and_all_records(trained: RunBuilder) -> None:
    before = files(trained.run.path)
    removed = call("disk", "clean", "adder", "--yes").output
    num_gone = len(before - files(trained.run.path)) + 2  # and the two folders: they count as files
    assert f" in {num_gone} files." in removed.splitlines()[-1]
    gone = {name.rsplit("/", 1)[0] for name in before - files(trained.run.path)}
    assert gone == {"checkpoints/step_2", "export/step_2"}
    assert newest_step(trained.run) == 4
    assert call("disk", "clean", "adder").output == "There is nothing to remove.\n"


def test_clean_refuses_a_run_that_is_trained(trained: RunBuilder) -> None:
    trained.hold(1, beat_age_s=2.0)
    before = files(trained.run.path)
    result = call("disk", "clean", "adder", "--yes")
    assert result.exit_code == EXIT_HELD
    assert "is being trained" in result.stderr or "trains" in result.stderr
    assert files(trained.run.path) == before


def test_clean_removes_nothing_where_the_newest_checkpoint_is_damaged(trained: RunBuilder) -> None:
    (trained.run.checkpoint(4) / "weights.pt").write_bytes(b"x" * 4096)
    before = files(trained.run.path)
    result = call("disk", "clean", "adder", "--yes")
    assert result.exit_code == EXIT_CONFIG
    assert "step_4 is damaged" in result.stderr
    assert files(trained.run.path) == before


def test_clean_refuses_a_run_that_others_may_write(trained: RunBuilder) -> None:
    trained.run.path.chmod(0o777)
    assert call("disk", "clean", "adder", "--yes").exit_code == EXIT_CONFIG


def test_clean_wants_a_run_by_name() -> None:
    assert call("disk", "clean").exit_code == EXIT_CONFIG
