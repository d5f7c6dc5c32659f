"""Keys that were renamed: an error that names the new one, but in the runs that were begun before."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpc_grpo.config import LaunchConfig, load_config, load_launch, load_resolved, load_resolved_launch, to_yaml
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.run.chain import ChainRecord, read_chain
from hpc_grpo.run.paths import RunDir

NOW = r"launch\.slurm\.num_nodes is now launch\.num_nodes: set launch\.num_nodes=3 instead"


def old_spelling(path: Path, num_nodes: int) -> Path:
    """A file of before the rename, as a run directory holds it."""
    values = yaml.safe_load(path.read_text())
    values["launch"].pop("num_nodes")
    values["launch"]["slurm"]["num_nodes"] = num_nodes
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_old_key_in_a_file_is_an_error_that_names_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(load_config("local/debug")))
    with pytest.raises(ConfigError, match=NOW):
        load_config(str(old_spelling(path, 3)))


def test_the_old_key_in_an_override_is_an_error_that_names_the_new_one() -> None:
    with pytest.raises(ConfigError, match=NOW):
        load_config("local/debug", ["launch.slurm.num_nodes=3"])


def test_the_old_key_in_a_sites_file_is_an_error_that_names_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("launch: {slurm: {partition: workq, num_nodes: 3}}\n")
    with pytest.raises(ConfigError, match=NOW):
        load_launch(str(tmp_path / "site.yaml"))


def test_a_run_that_was_begun_with_the_old_key_is_resumed_with_the_new_one(tmp_path: Path) -> None:
    config = load_config("local/debug", [f"run.root={tmp_path}", "launch.num_nodes=2"])
    run = freeze(config, [], []).run
    old_spelling(run.config, 2)
    assert load_resolved(run.config) == config
    assert load_resolved_launch(run.config).num_nodes == 2
    assert freeze(config, [], []).changed == {}


def test_a_run_directory_without_a_launch_section_has_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {}\n")
    assert load_resolved_launch(tmp_path / "config.yaml") == LaunchConfig()


def test_a_chain_record_keeps_the_form_that_it_has_always_had(tmp_path: Path) -> None:
    """A job of a 2-node run wrote it before the rename; follow-on jobs ask for as many nodes."""
    run = RunDir(tmp_path)
    run.chain.write_text('{"links": [], "successor": "", "ended": "", "slurm": {"num_nodes": 2, "time_min": 90}}')
    had = read_chain(run).launch(LaunchConfig(num_nodes=1))
    assert (had.num_nodes, had.slurm.time_min) == (2, 90)
    assert ChainRecord().asking_for(had).slurm["num_nodes"] == 2
    assert ChainRecord().asking_for(had).launch(LaunchConfig()) == had
