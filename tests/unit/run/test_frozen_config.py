"""A run is read with the config that it was frozen with, whatever became of the file, and wherever the run is."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpc_grpo.config import Config, load_resolved, to_yaml
from hpc_grpo.errors import ConfigError
from hpc_grpo.run import frozen_config
from hpc_grpo.run.files import copy_path
from hpc_grpo.run.frozen_config import read_config, rewrite_config, write_config
from hpc_grpo.run.paths import RunDir
from tests.support.configs import minimal_config


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "test")
    write_config(run, config_of(run))
    return run


def config_of(run: RunDir) -> Config:
    return minimal_config(run={"name": run.path.name, "root": str(run.path.parent)})


@pytest.mark.parametrize("damage", ["emptied", "torn", "header torn", "removed", "not text"])
def test_a_damaged_config_is_read_from_its_copy(damage: str, run: RunDir) -> None:
    content = run.config.read_bytes()
    match damage:
        case "emptied":
            run.config.write_bytes(b"")
        case "torn":
            run.config.write_bytes(content[: len(content) // 2])
        case "header torn":
            run.config.write_bytes(content[:20])
        case "removed":
            run.config.unlink()
        case "not text":
            run.config.write_bytes(b"\xff" + content[1:])
    assert read_config(run) == config_of(run)
    assert run.has_config()


def test_a_config_that_was_edited_is_refused_with_what_differs(run: RunDir) -> None:
    run.config.write_text(run.config.read_text().replace("group_size: 8", "group_size: 9"))
    with pytest.raises(ConfigError) as caught:
        read_config(run)
    assert "rollout.group_size: 8 written, 9 now" in str(caught.value)
    assert f"cp {copy_path(run.config)} {run.config}" in str(caught.value)


def test_a_config_that_is_damaged_like_its_copy_is_refused(run: RunDir) -> None:
    for path in (run.config, copy_path(run.config)):
        path.write_text(path.read_text().replace("group_size: 8", "group_size: 9"))
    with pytest.raises(ConfigError, match="is damaged, and so is its copy"):
        read_config(run)


def test_a_config_from_before_there_were_digests_is_read_as_it_is(run: RunDir) -> None:
    run.config.write_text(to_yaml(config_of(run)))
    copy_path(run.config).unlink()
    assert read_config(run) == config_of(run)


def test_a_run_that_was_moved_is_where_it_is(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    moved = RunDir(run.path.rename(tmp_path / "elsewhere" / "renamed"))
    config = read_config(moved)
    assert config.run_path == moved.path
    assert config.model_copy(update={"run": config_of(run).run}) == config_of(run)
    (tmp_path / "link").symlink_to(moved.path)
    assert read_config(RunDir(tmp_path / "link")).run_path == tmp_path / "link"


def test_a_config_that_is_rewritten_has_no_keys_that_the_runs_own_copy_cannot_know(run: RunDir) -> None:
    older = yaml.safe_load(to_yaml(config_of(run)))
    del older["deadlines"], older["checkpoint"]["behind_training"], older["rewards"][0]["weight"]
    frozen_config._write(run, older)
    changes = {"env": {"NEW": "1"}, "bringup_deadline_s": 60.0}
    now = read_config(run).model_copy(update={"launch": read_config(run).launch.model_copy(update=changes)})
    rewrite_config(run, now, ["launch.env.NEW", "launch.bringup_deadline_s"])
    older["launch"] |= changes
    assert yaml.safe_load(run.config.read_text()) == older
    assert load_resolved(run.config) == now


@pytest.mark.parametrize(
    ("has_copy", "advice"), [(True, "python {0}/source resume {0} "), (False, "Install that version")]
)
def test_a_run_that_another_version_has_written_goes_on_with_its_own_copy(
    has_copy: bool, advice: str, run: RunDir
) -> None:
    older = yaml.safe_load(to_yaml(config_of(run)))
    older["engine"] |= {"enforce_eager": False, "prefix_caching": True}
    frozen_config._write(run, older)
    if has_copy:
        run.source_dir.mkdir()
    with pytest.raises(ConfigError, match="was written by another version of hpc-grpo") as caught:
        read_config(run)
    assert advice.format(run.path) in str(caught.value)
    assert "leave it out" not in str(caught.value)


def test_the_version_that_has_written_a_run_says_what_is_wrong_with_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen_config._write(run, {**yaml.safe_load(to_yaml(config_of(run))), "nonsense": 1})
    monkeypatch.setattr(frozen_config, "__file__", str(run.source_dir / "hpc_grpo" / "run" / "frozen_config.py"))
    with pytest.raises(ConfigError, match="nonsense: unknown key"):
        read_config(run)


@pytest.mark.parametrize("key", ["deadlines.silent_s", "checkpoint.behind_training", "rewards.0.timeout_s"])
def test_a_key_that_the_runs_own_copy_cannot_know_is_refused_before_a_job_does(key: str, run: RunDir) -> None:
    older = yaml.safe_load(to_yaml(config_of(run)))
    del older["deadlines"], older["checkpoint"]["behind_training"], older["rewards"][0]["timeout_s"]
    frozen_config._write(run, older)
    before = run.config.read_text()
    with pytest.raises(ConfigError, match=rf"does not know {key}.*--accept-changes"):
        rewrite_config(run, read_config(run), ["train.total_steps", "rewards.7.name", key])
    assert run.config.read_text() == before
