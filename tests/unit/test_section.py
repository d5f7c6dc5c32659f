"""Paths in a config: ~ and variables are replaced while it is loaded, and never again."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.config import Config, load_config, load_launch, load_resolved, to_yaml, with_overrides
from hpc_grpo.errors import ConfigError

LEAST = "{run: {name: n}, model: {path: org/m}, data: {train: {path: d.jsonl}}, train: {total_steps: 1}}"
ENVIRON = {"SCRATCH": "/scratch/me", "HOME": "/home/me", "EMPTY": ""}


@pytest.fixture
def least(tmp_path: Path) -> Path:
    (tmp_path / "least.yaml").write_text(LEAST)
    return tmp_path / "least.yaml"


def load(least: Path, *overrides: str) -> Config:
    return load_config(str(least), overrides, ENVIRON)


PATHS = {
    "run.root": lambda config: str(config.run.root),
    "model.path": lambda config: config.model.path,
    "data.train.path": lambda config: config.data.train.path,
    "launch.python": lambda config: config.launch.python,
}


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize("text", ["$SCRATCH/x", "${SCRATCH}/x"])
def test_a_variable_in_a_path_is_replaced(key: str, text: str, least: Path) -> None:
    assert PATHS[key](load(least, f"{key}={text}")) == "/scratch/me/x"


@pytest.mark.parametrize("key", PATHS)
def test_the_home_of_the_user_is_written_out(key: str, least: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert PATHS[key](load(least, f"{key}=~/x")) == "/home/me/x"


def test_files_of_functions_are_paths_too(least: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    words = ["rewards=[{name: $SCRATCH/r.py:score}]", "loss.name=$SCRATCH/l.py:mine", "loss.advantage=~/a.py:mine"]
    config = load(least, *words, "data.eval={path: $SCRATCH/e.jsonl}")
    assert config.rewards[0].name == "/scratch/me/r.py:score"
    assert (config.loss.name, config.loss.advantage.name) == ("/scratch/me/l.py:mine", "/home/me/a.py:mine")
    assert config.data.eval is not None
    assert config.data.eval.path == "/scratch/me/e.jsonl"


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize(
    ("text", "name"), [("$WORKDIR/x", "WORKDIR"), ("${WORKDIR}/x", "WORKDIR"), ("$EMPTY/x", "EMPTY")]
)
def test_a_variable_that_is_not_set_is_an_error_with_its_name(key: str, text: str, name: str, least: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(least, f"{key}={text}")
    assert caught.value.exit_code == 78
    assert f"{key} = {text!r}: {name} is not set here" in str(caught.value)
    assert "Export it" in str(caught.value)


def test_the_files_that_a_config_builds_on_name_variables_as_well(least: Path) -> None:
    (least.parent / "site.yaml").write_text("run: {root: $SCRATCH/runs}")
    least.write_text(LEAST.replace("{run:", "{base: site.yaml, run:", 1))
    assert load(least).run_path == Path("/scratch/me/runs/n")
    with pytest.raises(ConfigError, match=r"run.root = '\$SCRATCH/runs': SCRATCH is not set here"):
        load_config(str(least), (), {})
    assert load_config(str(least), ["run.root=/r"], {}).run_path == Path("/r/n")


def test_what_a_node_replaces_stays_as_it_is(least: Path) -> None:
    config = load(least, "launch.local_dir=$LOCALDIR", "launch.env={HF_HOME: $SCRATCH/hf}")
    assert (config.launch.local_dir, config.launch.env["HF_HOME"]) == ("$LOCALDIR", "$SCRATCH/hf")


def test_a_site_alone_has_its_python_replaced(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("launch: {python: $SCRATCH/python}")
    assert load_launch(str(tmp_path / "site.yaml"), (), ENVIRON).python == "/scratch/me/python"


def test_a_run_directory_that_has_a_dollar_in_its_name_is_found_again(least: Path) -> None:
    """A run begun before paths were expanded lies in a folder of that literal name."""
    kept = least.with_name("config.yaml")
    kept.write_text(to_yaml(load(least, "run.root=/r")).replace("root: /r", "root: /r/$SCRATCH"))
    resolved = load_resolved(kept)
    assert resolved.run_path == Path("/r/$SCRATCH/n")
    changed = with_overrides(resolved, ["checkpoint.every=5"], {})
    assert changed.run_path == resolved.run_path


def test_overrides_of_a_resolved_config_are_replaced(least: Path) -> None:
    changed = with_overrides(load(least), ["launch.python=$SCRATCH/python"], ENVIRON)
    assert changed.launch.python == "/scratch/me/python"


def test_steps_to_profile_are_given_in_their_order(least: Path) -> None:
    assert load(least, "metrics.profile_steps=[3, 4]").metrics.profile_steps == (3, 4)
    with pytest.raises(ConfigError, match=r"metrics\.profile_steps.*\[3, 4\]"):
        load(least, "metrics.profile_steps=[4, 3]")
