"""A run has its own copy of the package, and of the user's functions with what they import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_grpo.run import source
from hpc_grpo.run.copied_main import refuse_damage
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.source import copy_problems, copy_source, copyable, entry, functions_of, imported_files, used_file
from tests.support.configs import minimal_config


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run, and have it copy a small package."""
    package = tmp_path / "installed" / "hpc_grpo"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "cli.py").write_text("import sys, hpc_grpo\nprint(hpc_grpo.__file__, sys.argv[1:])\n")
    monkeypatch.setattr(source, "PACKAGE", package)
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def test_the_copy_wins_over_the_working_folder_and_what_is_installed(run: RunDir, tmp_path: Path) -> None:
    copy_source(run, {}, "")
    command = [sys.executable, str(run.source_dir)]
    for words in (["attempt", "RUN"], ["-m", "hpc_grpo.cli", "attempt", "RUN"]):
        done = subprocess.run(
            [*command, *words], cwd=tmp_path / "installed", capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{run.source_dir / 'hpc_grpo' / '__init__.py'} ['attempt', 'RUN']\n"


def test_a_copy_that_is_damaged_is_refused_before_it_is_imported(run: RunDir) -> None:
    digest = copy_source(run, {}, "")
    assert copy_problems(run, digest) == []
    (run.source_dir / "hpc_grpo" / "cli.py").write_text("print(")
    (run.source_dir / "hpc_grpo" / "more.py").touch()
    done = subprocess.run([sys.executable, str(run.source_dir), "attempt"], capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert done.stderr.startswith(f"error: {run.source_dir}/hpc_grpo/cli.py is missing or damaged")
    assert copy_problems(run, digest) == ["hpc_grpo/cli.py is changed", "hpc_grpo/more.py is new"]


def test_a_damaged_copy_of_any_run_names_the_command_that_started_it(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_source(run, {}, "")
    (run.source_dir / "hpc_grpo" / "cli.py").unlink()
    with pytest.raises(SystemExit):
        refuse_damage(run.source_dir)
    assert "The command that started the run, with --accept-changes, copies" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["removed", "emptied", "torn"])
def test_a_copy_whose_sums_are_damaged_is_refused_in_words(run: RunDir, damage: str) -> None:
    copy_source(run, {}, "")
    sums = run.source_dir / source.SUMS
    if damage == "removed":
        sums.unlink()
    else:
        sums.write_text("" if damage == "emptied" else sums.read_text()[:40])
    done = subprocess.run([sys.executable, str(run.source_dir), "attempt"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith(f"error: {sums} is missing or damaged")


def test_the_copy_of_a_read_only_installation_can_be_replaced_and_removed(run: RunDir) -> None:
    for path in (*source.PACKAGE.rglob("*"), source.PACKAGE):
        path.chmod(0o555 if path.is_dir() else 0o444)
    copy_source(run, {}, "")
    assert all(path.stat().st_mode & 0o200 for path in run.source_dir.rglob("*"))


def test_a_function_is_copied_with_what_it_imports_and_imported_from_the_copy(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("import json, words\nfrom parts.one import one\n")
    (tmp_path / "words.py").touch()
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "one.py").touch()
    (tmp_path / "unused.py").touch()
    names = [path.name for path in imported_files(tmp_path / "mine.py")]
    assert sorted(names) == ["mine.py", "one.py", "words.py"]
    config = minimal_config(rewards=[{"name": "mine.py:reward"}, {"name": "correctness"}, {"name": "words:reward"}])
    files = copyable(config, tmp_path)
    assert files == {"mine.py": tmp_path / "mine.py"}
    copy_source(run, files, "")
    assert used_file("mine.py:reward", tmp_path) == tmp_path / "mine.py"
    monkeypatch.setattr(source, "PACKAGE", run.source_dir / "hpc_grpo")  # as in a process that runs from the copy
    copy = used_file("mine.py:reward", tmp_path)
    assert copy is not None
    assert copy.is_relative_to(run.source_dir / "functions")
    assert (copy.parent / "parts" / "one.py").is_file()
    assert used_file("words:reward", tmp_path) == tmp_path / "words.py"


def test_a_function_that_asks_where_it_is_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("LIST = open(__file__ + '.txt')\n")
    assert copyable(minimal_config(rewards=[{"name": "mine.py:reward"}]), tmp_path) == {}


def test_a_run_from_before_there_were_copies_runs_what_is_installed(run: RunDir) -> None:
    assert entry(run) == [str(run.source_dir)]  # not frozen yet: its job will find a copy
    run.config.touch()
    assert entry(run) == ["-m", "hpc_grpo.cli"]
    copy_source(run, {}, "")
    assert entry(run) == [str(run.source_dir)]


def test_functions_of_the_loss_are_the_runs_own_too() -> None:
    config = minimal_config(loss={"name": "l.py:f", "advantage": "a.py:f", "correction": "c.py:f"})
    assert functions_of(config) == {
        "loss.name": "l.py:f",
        "loss.advantage.name": "a.py:f",
        "loss.correction.name": "c.py:f",
    }


@pytest.mark.parametrize("has_copy", [True, False])
def test_a_node_that_does_not_see_the_copy_takes_the_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_copy: bool
) -> None:
    (tmp_path / "hpc_grpo").mkdir()
    (tmp_path / "__main__.py").write_text("print('the copy')")
    (tmp_path / source.SUMS).touch()
    monkeypatch.setattr(source, "PACKAGE", tmp_path / "hpc_grpo")
    command = source.command_anywhere("-c", "print('installed')")
    if not has_copy:
        (tmp_path / source.SUMS).unlink()
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.strip() == ("the copy" if has_copy else "installed")
